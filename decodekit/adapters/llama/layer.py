"""One layer of the LLaMA family around its attention, as functions of rows and weights alone.

Everything here treats each row by itself, whatever sequence it belongs to, and nothing depends on
the length of the context: so code compiled for a number of rows serves every layer and every step.

Shapes: N rows of all sequences, E hidden size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decodekit.adapters.llama.rope import rotate
from decodekit.adapters.llama.weights import LayerWeights, project

__all__ = ["between_attentions", "into_attention", "normed", "out_of_attention"]


def normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm (Zhang and Sennrich, arXiv 1910.07467) of states [..., E].

    In float32 whatever the dtype is, as ``transformers`` does it: to be its equal.
    """
    wide = torch.rms_norm(states.to(torch.float32), weight.shape, None, epsilon)
    return weight * wide.to(states.dtype)


def into_attention(
    layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, turned, [N, H + K, D], and values, [N, K, D].

    Args:
        layer: Its weights.
        hidden: [N, E].
        cos: [N, 1, D], as ``rotate`` takes it.
        sin: Likewise.
        epsilon: Of the norm.
    """
    heads, kv_heads = layer.heads, layer.kv_heads
    states = project(layer.qkv, normed(hidden, layer.attention_norm, epsilon))
    all_NHD = states.view(states.shape[0], heads + 2 * kv_heads, -1)
    return rotate(all_NHD[:, : heads + kv_heads], cos, sin), all_NHD[:, heads + kv_heads :]


def out_of_attention(layer: LayerWeights, hidden: Tensor, output: Tensor, epsilon: float) -> Tensor:
    """Return what the layer makes of its input and its attention, [N, E].

    Args:
        layer: Its weights.
        hidden: What came into the layer, [N, E].
        output: What attention gave, [N, H * D].
        epsilon: Of the norm.
    """
    hidden = hidden + project(layer.out, output)
    states = normed(hidden, layer.mlp_norm, epsilon)
    gate, up = project(layer.gate_up, states).chunk(2, dim=-1)
    return hidden + project(layer.down, layer.activation(gate) * up)


def between_attentions(
    layer: LayerWeights,
    following: LayerWeights,
    hidden: Tensor,
    output: Tensor,
    cos: Tensor,
    sin: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all from one layer's attention to that of the ``following`` layer.

    Returns:
        ``out_of_attention`` of the one, and ``into_attention`` of the other.
    """
    hidden = out_of_attention(layer, hidden, output, epsilon)
    return hidden, *into_attention(following, hidden, cos, sin, epsilon)
