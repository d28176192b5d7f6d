"""A ``transformers`` model's weights, laid out for the lean forward pass and shared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from decodekit.execution.fused import fuse_linears
from decodekit.execution.packed import PackedLinear, PackedRows, packed_linear

__all__ = ["LayerWeights", "Projection", "layer_weights", "project", "projection"]


class _Part(NamedTuple):
    """A linear layer without its module, so that compiled code is the same for all layers.

    Attributes:
        weight: [out, in], or what ``PackedLinear`` made of it.
        bias: [out], or None.
        packed: The number of outputs of a packed weight; 0 for a plain one.
    """

    weight: Tensor
    bias: Tensor | None
    packed: int


Projection: TypeAlias = tuple[_Part, ...]
"""A linear map of states [..., in] to [..., out]: the outputs of its parts, side by side."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        attention_norm: Weight of the RMS norm before attention, [hidden].
        qkv: Queries of all heads, then keys and values of all kv heads.
        heads: H, query heads.
        kv_heads: K, kv heads.
        scale: Factor on the attention scores.
        window: The sliding window in positions; None for full attention.
        out: From the heads' outputs, side by side, to the hidden size.
        mlp_norm: Weight of the RMS norm before the MLP, [hidden].
        gate_up: The gate, then what it is multiplied with.
        activation: Of the gate.
        down: Back to the hidden size.
    """

    attention_norm: Tensor
    qkv: Projection
    heads: int
    kv_heads: int
    scale: float
    window: int | None
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    activation: Callable[[Tensor], Tensor]
    down: Projection


def layer_weights(layer: Any, *, window: int | None) -> LayerWeights:
    """Return the weights of a ``transformers`` decoder layer; fuse what reads the same input.

    Args:
        layer: With the modules of the LLaMA family. The weights of its query, key, value, gate and
            up projections become views of fused ones, with the same values.
        window: As in ``LayerWeights``.
    """
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=_joint([attention.q_proj, attention.k_proj, attention.v_proj]),
        heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        scale=attention.scaling,
        window=window,
        out=projection(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_joint([mlp.gate_proj, mlp.up_proj]),
        activation=mlp.act_fn,
        down=projection(mlp.down_proj),
    )


def projection(module: Any) -> Projection:
    """Return what a linear layer computes, without the overhead of calling a module."""
    if type(module) is nn.Linear:
        bias = None if module.bias is None else module.bias.detach()
        return (_Part(module.weight.detach(), bias, 0),)
    assert isinstance(module, PackedLinear), "support.py lets no other class pass"
    return (_Part(module.packed, module.plain_bias, module.out_features),)


def project(projection: Projection, states: Tensor) -> Tensor:
    """Return the outputs [..., out] for states [..., in]."""
    outputs = [
        packed_linear(states, weight, bias, packed) if packed else linear(states, weight, bias)
        for weight, bias, packed in projection
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _joint(modules: Sequence[Any]) -> Projection:
    """Return what linear layers compute side by side, as one layer."""
    first = modules[0]
    if isinstance(first, PackedRows):  # packed after they were fused: never one without the others
        return projection(first.whole)
    if all(type(module) is nn.Linear for module in modules):
        return projection(fuse_linears(modules))
    # Packed before anybody fused them.
    return tuple(part for module in modules for part in projection(module))
