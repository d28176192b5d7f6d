"""Rotary position embeddings from tables by absolute position.

Which frequencies, and which factor on them, is the model's own rotary module's business: the tables
are what it returns for the positions 0, 1, 2, ..., so every static scaling is right without a line
here. Su et al., arXiv 2104.09864, in the form with the two halves of a head as partners.

Shapes: B batch, R rows, D head dim, C positions in the tables.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

__all__ = ["RotaryTable", "rotate"]

_LEAST = 256


class RotaryTable:
    """Cosines and sines of the positions so far, [C, 2 D]; it doubles when one beyond is asked for.

    Args:
        rotary: A ``transformers`` rotary module whose frequencies do not move.
        dtype: Of queries and keys.
        device: Theirs.
    """

    def __init__(self, rotary: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        self._rotary = rotary
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._table = self._computed(0)

    def at(self, positions: Tensor, *, end: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, both [B, R, 1, D], for ``rotate``.

        Args:
            positions: [B, R].
            end: More than any of them; given, so that nobody has to wait for the device.
        """
        cos, sin = embedding(positions, self.up_to(end))[:, :, None].chunk(2, dim=-1)
        return cos, sin

    def up_to(self, end: int) -> Tensor:
        """Return cosines and signed sines, side by side, of all positions below ``end`` or more."""
        table = self._table  # another thread may exchange it meanwhile, for a shorter one too
        if end > len(table):
            self._table = table = self._computed(max(_LEAST, 2 ** (end - 1).bit_length()))
        return table

    def _computed(self, count: int) -> Tensor:
        positions = torch.arange(count, device=self._like.device)[None]
        cos, sin = self._rotary(self._like, positions)
        # rotate() only swaps the halves; the sign of the second one is in the sines.
        first, second = sin.chunk(2, dim=-1)
        table: Tensor = torch.cat([cos, -first, second], dim=-1)[0]
        return table


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``states`` [B, R, heads, D] turned to the positions of ``cos`` and ``sin``."""
    return states * cos + states.roll(states.shape[-1] // 2, -1) * sin
