"""A small byte-level language model in plain torch.

Shapes: B batch, R rows, H query heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

__all__ = ["END", "POSITIONS", "VOCABULARY", "Attend", "ByteModel"]

VOCABULARY = 256
POSITIONS = 384
END = 0  # the byte that ends a text

Attend: TypeAlias = "Callable[[int, Tensor, Tensor, Tensor], Tensor]"
"""Called with the layer's number, query [B, H, R, D], key and value [B, K, R, D] of the new rows;
returns what they attend to, [B, R, H, D]."""


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.before_attention = nn.LayerNorm(width)
        self.before_mlp = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, states: Tensor, layer: int, attend: Attend) -> Tensor:
        """Return the states [B, R, width] after this block."""
        split = self.query_key_value(self.before_attention(states)).unflatten(-1, (-1, self.dim))
        query, key, value = split.transpose(1, 2).split(
            [self.heads, self.kv_heads, self.kv_heads], dim=1
        )
        states = states + self.out(attend(layer, query, key, value).flatten(2))
        out: Tensor = states + self.down(gelu(self.up(self.before_mlp(states))))
        return out


class ByteModel(nn.Module):
    """Bytes in, logits of the next byte out. It knows nothing of caches and trees."""

    def __init__(self, *, width: int = 48, layers: int = 2, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(POSITIONS, width)
        self.blocks = nn.ModuleList(_Block(width, heads, kv_heads) for _ in range(layers))
        self.last_norm = nn.LayerNorm(width)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.tokens.weight.device

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last states [B, R, width] of tokens [B, R] at positions [B, R]."""
        states = self.tokens(tokens) + self.positions(positions)
        for layer, block in enumerate(self.blocks):
            states = block(states, layer, attend)
        last: Tensor = self.last_norm(states)
        return last

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [..., V] after last states [..., width]."""
        return states @ self.tokens.weight.T
