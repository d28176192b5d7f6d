"""Whether the last bits of a row depend on the other rows of a pass, and on what that hangs.

Where they do not, every strategy writes the tokens of autoregressive decoding, ties included; see
docs/lossless.md, "To the bit".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decodekit.adapters.execution.packed import PackedLinear
from decodekit.interfaces.adapter import HasExecution, ModelAdapter

__all__ = ["invariance_obstacle"]

_HALF = (torch.bfloat16, torch.float16)


def invariance_obstacle(adapter: ModelAdapter, execution: str) -> str | None:
    """Return in one clause why a row's last bits may depend on others; None if they do not.

    It is said of linear layers and of attention, for which it is known or was found out on this
    machine; that norms, rotations and activations treat each row alike was measured.

    Args:
        adapter: What runs the model.
        execution: How it was prepared.
    """
    if execution == "native":
        reason = adapter.native_obstacle() if isinstance(adapter, HasExecution) else None
        return None if reason is None else f"the model was changed, and now {reason}"
    model = getattr(adapter, "model", None)
    if not isinstance(model, nn.Module) or not hasattr(model, "dtype"):
        return "nothing is known of this adapter's passes"
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        return "nothing is known of kernels of other devices than the CPU"
    if execution == "compiled":
        return "compiled code is another one for each number of rows"
    return _layers_obstacle(model) or _attention_obstacle(adapter, model.dtype)


def _layers_obstacle(model: nn.Module) -> str | None:
    packed = {
        name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)
    }
    for name, module in model.named_modules():
        matrices = any(weight.ndim > 1 for weight in module.parameters(recurse=False))
        if matrices and not isinstance(module, nn.Embedding):
            return f"its {name} is not packed"
    for place, layer in packed.items():
        name = place.removesuffix(".whole")  # of a fused group
        if not layer.call_sizes.invariant:
            return f"this processor's kernels for its {name} give no number of rows the same bits"
    return None


def _attention_obstacle(adapter: ModelAdapter, dtype: Any) -> str | None:
    if getattr(adapter, "keeps_attention", False):
        return "the model attends by itself"
    backend = str(getattr(getattr(adapter, "backend", None), "name", None))
    if backend == "invariant" or (backend == "auto" and dtype in _HALF):
        return None
    kernel = "sdpa, which backend=auto takes in this dtype," if backend == "auto" else backend
    return f"attention by {kernel} adds up by the number of rows"
