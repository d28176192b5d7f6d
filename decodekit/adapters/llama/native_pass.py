"""The lean forward pass in C++; see ``decodekit.adapters.execution.native``.

A row's logits depend on its token, its position and what it sees alone, to the last bit: not on
what else is guessed, accepted or decoded in the same batch, nor on how a prompt is cut into pieces.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from decodekit.adapters.execution.huge_pages import use_huge_pages
from decodekit.adapters.execution.native.library import (
    DTYPES,
    LANES,
    NativeLibrary,
    NativeModel,
    Step,
)
from decodekit.adapters.llama.cache import LlamaCache
from decodekit.adapters.llama.forward import LeanForward
from decodekit.adapters.llama.weights import LayerWeights, Projection
from decodekit.errors import GenerationError
from decodekit.interfaces.plan import StepPlan

__all__ = ["NativeForward", "native_obstacle"]

_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def native_obstacle(lean: LeanForward, library: NativeLibrary) -> str | None:
    """Return why the library cannot run a model; None if it can.

    The library reads memory at addresses that it is given, so all that it assumes is checked here.
    """
    if lean.dtype not in DTYPES:
        return f"it has kernels for float32 and bfloat16, not {lean.dtype}"
    for layer in lean.layers:
        if not _is_silu(layer.activation):
            return f"the activation is {type(layer.activation).__name__}, not SiLU"
        if layer.window is not None and layer.window < 1:
            return f"a sliding window of {layer.window} hides a row from itself"
        projections = (layer.qkv, layer.out, layer.gate_up, layer.down, lean.head)
        if any(len(parts) > 1 or parts[0].packed for parts in projections):
            return "its weights were packed, or exchanged one by one"
    first = lean.layers[0]
    inputs, inner = (part.weight.shape[1] for part in (*first.out, *first.down))
    (vocabulary, hidden), dim = lean.head[0].weight.shape, inputs // first.heads
    if not library.has_heads_of(dim, lean.dtype):
        return f"it has no kernel for heads of {dim} numbers in {lean.dtype}"
    run = LANES if lean.dtype == torch.float32 else 2 * LANES  # inputs are read so many at a time
    for name, size, unit in (
        ("hidden", hidden, run),
        ("MLP", inner, run),
        ("vocabulary", vocabulary, LANES),
    ):
        if size % unit:
            return f"its {name} size, {size}, is no multiple of {unit}"
    return _misfit(lean, hidden=hidden, dim=dim, inner=inner, vocabulary=vocabulary)


def _misfit(lean: LeanForward, *, hidden: int, dim: int, inner: int, vocabulary: int) -> str | None:
    """Return which weight is not of the size, dtype or place in memory that it has to be."""
    first = lean.layers[0]
    heads, kv_heads = first.heads, first.kv_heads
    if heads % kv_heads:
        return f"its {heads} query heads cannot be shared by {kv_heads} kv heads"
    shapes = {
        "embedding": (len(lean.embedding), hidden),
        "norm": (hidden,),
        "head": (vocabulary, hidden),
        "head_bias": (vocabulary,),
        "attention_norm": (hidden,),
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "qkv_bias": ((heads + 2 * kv_heads) * dim,),
        "out": (hidden, heads * dim),
        "out_bias": (hidden,),
        "mlp_norm": (hidden,),
        "gate_up": (2 * inner, hidden),
        "gate_up_bias": (2 * inner,),
        "down": (hidden, inner),
        "down_bias": (hidden,),
    }
    for layer in lean.layers:
        if (layer.heads, layer.kv_heads) != (heads, kv_heads):
            return "its layers have different numbers of heads"
    weights: list[tuple[str, object]] = [*_outer_weights(lean).items()]
    for layer in lean.layers:
        weights.extend(_weights_of(layer).items())
    for name, tensor in weights:
        if isinstance(tensor, Tensor):
            if tensor.shape != shapes[name] or tensor.dtype != lean.dtype:
                return f"its {name} is {list(tensor.shape)} of {tensor.dtype}, unlike the others"
            if not tensor.is_contiguous() or not tensor.data_ptr():
                return f"its {name} does not lie in memory in one piece"
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
        weights = _outer_weights(lean)
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
        """Return the logits [1 + T, V] of B plans; see ``ModelAdapter.forward``.

        Raises:
            GenerationError: A token cannot be embedded, or there is no memory for the step.
        """
        known = self._model.tokens
        step = Step(*(array("i") for _ in range(7)))
        for plan in plans:
            start, mask, tokens = len(step.token), plan.mask(), plan.tokens
            if not 0 <= min(tokens) <= max(tokens) < known:
                raise GenerationError(
                    f"a token is not in the model's vocabulary of {known}: its ids are from "
                    f"{min(tokens)} to {max(tokens)}"
                )
            step.start.append(start)
            step.prefix.append(plan.prefix)
            step.token.extend(tokens)
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


def _outer_weights(lean: LeanForward) -> dict[str, Tensor | None]:
    return {
        "embedding": lean.embedding,
        "norm": lean.norm,
        "head": lean.head[0].weight,
        "head_bias": lean.head[0].bias,
    }


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
