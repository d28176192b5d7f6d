"""A ``transformers`` model's weights, laid out for the lean forward pass and shared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from decodekit.execution.fused import fuse_linears, have_biases_alike
from decodekit.execution.packed import PackedRows

__all__ = ["LayerWeights", "Projection", "layer_weights", "projection"]

Projection = Callable[[Tensor], Tensor]
"""A linear map of states [..., in] to [..., out]."""


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
    activation: Projection
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
        return partial(linear, weight=module.weight.detach(), bias=bias)
    forward: Projection = module.forward
    return forward


def _joint(modules: Sequence[Any]) -> Projection:
    """Return what linear layers compute side by side, as one layer."""
    wholes = {module.whole for module in modules if isinstance(module, PackedRows)}
    if len(wholes) == 1 and all(isinstance(module, PackedRows) for module in modules):
        return wholes.pop().forward  # packed after they were fused
    if all(type(module) is nn.Linear for module in modules) and have_biases_alike(modules):
        return projection(fuse_linears(modules))
    # Packed before anybody fused them, or exchanged one by one.
    parts = [projection(module) for module in modules]
    return lambda states: torch.cat([part(states) for part in parts], dim=-1)
