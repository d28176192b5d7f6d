"""Which ``transformers`` models the ``llama`` adapter can run, and why not the others.

The adapter reads a model's weights and runs none of its code but the activation, so anything that
changes what that code does has to be found here: another class anywhere in the model, a hook, a
replaced method.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from decodekit.adapters.agreement import agrees
from decodekit.adapters.execution.packed import PackedLinear, PackedRows
from decodekit.adapters.model_code import (
    files_of,
    foreign_attention,
    foreign_function,
    foreign_part,
)
from decodekit.adapters.model_facts import is_in_training
from decodekit.errors import ModelSupportError
from decodekit.interfaces.adapter import ModelAdapter

__all__ = ["check_agreement", "check_support", "obstacle"]

_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)

_PLAIN = (nn.Embedding, nn.Linear, nn.ModuleList, PackedLinear, PackedRows)

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# These do nothing unless the model's own forward collects hidden states or attention weights.
_HARMLESS_HOOKS = "transformers.utils.output_capturing"


def check_support(model: PreTrainedModel) -> None:
    """Check that the ``llama`` adapter computes what ``model`` computes.

    Raises:
        ModelSupportError: With the model's class and the one thing that stands in the way.
    """
    reason = obstacle(model)
    if reason is not None:
        _refuse(model, reason)


def check_agreement(adapter: ModelAdapter, model: PreTrainedModel) -> None:
    """Check on a few tokens that ``adapter`` does compute what ``model`` computes.

    Raises:
        ModelSupportError: It does not: something was changed that is not known here.
    """
    if not agrees(adapter, model):
        _refuse(model, "its own forward pass gives other results, for a reason that is not known")


def _refuse(model: PreTrainedModel, reason: str) -> NoReturn:
    raise ModelSupportError(
        f"{type(model).__name__} cannot be decoded by the 'llama' adapter: {reason} "
        "(adapter=auto takes another where this one does not fit)",
        reason=reason,
    )


def obstacle(model: PreTrainedModel) -> str | None:
    """Return why the ``llama`` adapter cannot run ``model``; None if it can."""
    # Exactly these classes: one derived from them may compute something else.
    if type(model) not in _MODELS:
        names = ", ".join(known.__name__ for known in _MODELS)
        return f"its class is none of {names}"
    if model.training:
        return "it is in training mode, where dropout changes its output; call model.eval()"
    layers = model.model.layers
    if not len(layers):
        return "it has no layers"
    rope = model.model.rotary_emb.rope_type
    if rope not in _STATIC_ROPE:
        return f"its {rope!r} RoPE is none of {', '.join(_STATIC_ROPE)}"
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return "there is a hook on all modules, which would be skipped"
    for name, module in model.named_modules():
        reason = _change(
            name or "model",
            module,
            source=type(model).__module__,
            epsilon=model.config.rms_norm_eps,
        )
        if reason is not None:
            return reason
    if is_in_training(model):
        return "a part of it is in training mode, where dropout changes it; call model.eval()"
    heads = {(each.self_attn.head_dim, each.self_attn.k_proj.out_features) for each in layers}
    if len(heads) != 1:
        return "its layers have several sizes of heads or numbers of kv heads"
    if 2 * model.model.rotary_emb.inv_freq.numel() != layers[0].self_attn.head_dim:
        return "its RoPE turns only a part of each head"
    if model.model.embed_tokens.max_norm is not None:
        return "its embedding shortens long vectors (max_norm)"
    reason = foreign_attention(model)
    for file in files_of(model):
        reason = reason or foreign_function(file)
    if reason is not None:
        return reason
    return _weights_obstacle(model) or _sharing(model)


def _change(name: str, module: Any, *, source: str, epsilon: float) -> str | None:
    """Return what makes ``module`` compute something else than the file ``source`` says."""
    kind = type(module)
    activation = "act_fn" in name.split(".")  # it is called, whatever it is
    if not (kind.__module__ == source or kind in _PLAIN or activation):
        return f"its {name} is a {kind.__name__} (quantised, adapted or patched)"
    defined = getattr(kind.forward, "__module__", None)
    patched = (
        not activation
        and kind is not nn.ModuleList
        and (defined != kind.__module__ or foreign_part(kind.forward) is not None)
    )
    if "forward" in vars(module) or patched:
        return f"the forward of its {name} was replaced (offloaded or patched)"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if not activation and any(hook.__module__ != _HARMLESS_HOOKS for hook in hooks):
        return f"its {name} has a hook, which would be skipped"
    if getattr(module, "variance_epsilon", epsilon) != epsilon:
        return f"the epsilon of its {name} is {module.variance_epsilon}, not rms_norm_eps={epsilon}"
    return None


def _weights_obstacle(model: PreTrainedModel) -> str | None:
    weights = list(model.parameters())
    for name, weight in model.named_parameters():
        if type(weight) is not nn.Parameter:
            return f"its {name} is a {type(weight).__name__} (quantised)"
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) > 1:
        return f"its weights are spread over {', '.join(devices)}"
    if devices == ["meta"]:
        return "its weights are on the meta device, so there are none"
    dtypes = sorted({str(weight.dtype) for weight in weights})
    if len(dtypes) > 1:
        return f"its weights have several dtypes: {', '.join(dtypes)}"
    if weights[0].dtype not in _DTYPES:
        return f"its weights are of {dtypes[0]}"
    return None


def _sharing(model: PreTrainedModel) -> str | None:
    """Return which of the weights cannot become a view of a fused one."""
    seen: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        for weight in module.parameters(recurse=False):
            if weight.is_inference():
                return f"its {name} was made in inference mode, so it cannot be laid out anew"
            if weight in seen:
                return f"its {name} and its {seen[weight]} share their weights"
            seen[weight] = name
    return None
