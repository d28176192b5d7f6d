"""The lean forward pass in C++; see ``decodekit.execution.native``.

A row's logits depend on its token, its position and what it sees alone, to the last bit: not on
what else is guessed, accepted or decoded in the same batch, nor on how a prompt is cut into pieces.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from decodekit.adapters.llama.cache import LlamaCache
from decodekit.adapters.llama.forward import LeanForward
from decodekit.adapters.llama.weights import LayerWeights, Projection
from decodekit.execution.huge_pages import use_huge_pages
from decodekit.execution.native.library import (
    LANES,
    NativeLibrary,
    NativeModel,
    Step,
)
from decodekit.plan import StepPlan

__all__ = ["NativeForward", "native_obstacle"]

_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def native_obstacle(lean: LeanForward, library: NativeLibrary) -> str | None:
    """Return why the library cannot run a model; None if it can."""
    if lean.dtype not in (torch.float32, torch.bfloat16):
        return f"it has kernels for float32 and bfloat16, not {lean.dtype}"
    for layer in lean.layers:
        if not _is_silu(layer.activation):
            return f"the activation is {type(layer.activation).__name__}, not SiLU"
        projections = (layer.qkv, layer.out, layer.gate_up, layer.down, lean.head)
        if any(len(parts) > 1 or parts[0].packed for parts in projections):
            return "its weights were packed, or exchanged one by one"
    dim = lean.layers[0].out[0].weight.shape[1] // lean.layers[0].heads
    if not library.has_heads_of(dim, lean.dtype):
        return f"it has no kernel for heads of {dim} numbers"
    vocabulary, hidden = lean.head[0].weight.shape
    inner = lean.layers[0].down[0].weight.shape[1]
    for name, size in {"hidden": hidden, "MLP": inner, "vocabulary": vocabulary}.items():
        if size % LANES:
            return f"its {name} size, {size}, is no multiple of {LANES}"
    return None


def _is_silu(activation: object) -> bool:
    if not isinstance(activation, nn.Module) or type(activation) not in _SILU:
        return False
    return "forward" not in vars(activation) and not (
        activation._forward_hooks or activation._forward_pre_hooks
    )


class NativeForward:
    """Runs steps of one model.

    Args:
        lean: Without an obstacle; its weights are read where they are.
        library: The compiled functions.
    """

    def __init__(self, lean: LeanForward, library: NativeLibrary) -> None:
        self._lean, self._library = lean, library
        first = lean.layers[0]
        weights = {
            "embedding": lean.embedding,
            "norm": lean.norm,
            "head": lean.head[0].weight,
            "head_bias": lean.head[0].bias,
        }
        layers = [_weights_of(layer) for layer in lean.layers]
        self._model = NativeModel(
            weights, layers, heads=first.heads, kv_heads=first.kv_heads, epsilon=lean.epsilon
        )
        tensors = [*weights.values(), *(each for layer in layers for each in layer.values())]
        use_huge_pages(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for tensor in tensors
            if isinstance(tensor, Tensor)
        )

    def run(self, plans: Sequence[StepPlan], cache: LlamaCache) -> list[Tensor]:
        """Return the logits [1 + T, V] of B plans; see ``ModelAdapter.forward``."""
        step = Step(*(array("i") for _ in range(7)))
        for plan in plans:
            start, mask = len(step.token), plan.mask()
            step.start.append(start)
            step.prefix.append(plan.prefix)
            step.token.extend(plan.tokens)
            step.position.extend(mask.positions)
            step.tin.extend(mask.tin)
            step.tout.extend(mask.tout)
            # Those after which a token is needed: the anchor's and the nodes'.
            step.wanted.extend(range(start + plan.anchor_row, start + plan.rows))
        step.start.append(len(step.token))
        turns = self._lean.rotary.up_to(1 + max(step.position))
        logits = self._library.run(self._model, step, turns=turns, cache=cache.memory)
        if len(plans) == 1:
            return [logits]
        return list(torch.split(logits, [1 + len(plan.tree) for plan in plans]))


def _weights_of(layer: LayerWeights) -> dict[str, object]:
    def plain(name: str, projection: Projection) -> dict[str, Tensor | None]:
        (part,) = projection
        return {name: part.weight, f"{name}_bias": part.bias}

    return {
        "attention_norm": layer.attention_norm,
        "mlp_norm": layer.mlp_norm,
        **plain("qkv", layer.qkv),
        **plain("out", layer.out),
        **plain("gate_up", layer.gate_up),
        **plain("down", layer.down),
        "window": layer.window,
        "scale": layer.scale,
    }
