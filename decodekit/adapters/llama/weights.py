"""A ``transformers`` model's weights, laid out for the lean forward pass and shared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from decodekit.adapters.execution.fused import fuse_linears, have_biases_alike
from decodekit.adapters.execution.onednn import packed_linear
from decodekit.adapters.execution.packed import PackedLinear, PackedRows

__all__ = ["LayerWeights", "Projection", "layer_weights", "project", "projection"]


class _Part(NamedTuple):
    """A linear layer without its module, so that compiled code is the same for all layers.

    Attributes:
        weight: [out, in], or what ``PackedLinear`` made of it.
        bias: [out], or None.
        packed: The number of outputs of a packed weight; 0 for a plain one.
        kept: The outputs that are kept; None for all.
    """

    weight: Tensor
    bias: Tensor | None
    packed: int
    kept: slice | None = None

    def outputs(self, states: Tensor) -> Tensor:
        """Return the outputs [..., out] for states [..., in]."""
        if not self.packed:
            return linear(states, self.weight, self.bias)
        outputs = packed_linear(states, self.weight, self.bias, self.packed)
        return outputs if self.kept is None else outputs[..., self.kept]


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
    if isinstance(module, PackedRows):  # a layer of its group was exchanged
        kept = slice(module.start, module.start + module.out_features)
        return tuple(part._replace(kept=kept) for part in projection(module.whole))
    assert isinstance(module, PackedLinear), "support.py lets no other class pass"
    return (_Part(module.packed, module.plain_bias, module.out_features),)


def project(projection: Projection, states: Tensor) -> Tensor:
    """Return the outputs [..., out] for states [..., in]."""
    outputs = [part.outputs(states) for part in projection]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _joint(modules: Sequence[Any]) -> Projection:
    """Return what linear layers compute side by side, as one layer."""
    wholes = {module.whole for module in modules if isinstance(module, PackedRows)}
    if len(wholes) == 1 and all(isinstance(module, PackedRows) for module in modules):
        return projection(wholes.pop())  # packed after they were fused
    if all(type(module) is nn.Linear for module in modules) and have_biases_alike(modules):
        return projection(fuse_linears(modules))
    # Packed before anybody fused them, or exchanged one by one.
    return tuple(part for module in modules for part in projection(module))
