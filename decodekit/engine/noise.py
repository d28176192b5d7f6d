"""Random numbers that belong to a place in a text, whoever asks for them and when.

A counter-based generator (Philox4x64, Salmon et al., 2011) has no state: its numbers are a function
of a key, here the seed, and of a counter, here the absolute position, the purpose and an index.
The global generators of torch, numpy and random are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["CHOICE", "DRAFT", "TARGET", "TEST", "PositionNoise", "exponentials", "uniform"]

# What numbers are for; those of two purposes are independent.
TARGET = 0  # the target model's own choice
DRAFT = 1  # a draft model's drafts
TEST = 2  # whether a draft is accepted
CHOICE = 3  # whether the top choices are left out of the target's draw


def uniform(seed: int, position: int, *, purpose: int = TEST, draw: int = 0) -> float:
    """Return a uniform number in [0, 1) of a position, with 53 bits.

    Args:
        seed: The key, in [0, 2**64).
        position: The absolute position that it is for.
        purpose: What it is for.
        draw: Which number of that position and purpose.
    """
    return int(_generator(seed, position, purpose, draw).random_raw() >> 11) * 2.0**-53


def exponentials(seed: int, position: int, size: int, *, purpose: int = TARGET) -> Tensor:
    """Return numbers of the exponential distribution with mean 1, float64 [size], all above 0.

    Entry ``i`` is for token ``i``, whatever ``size`` is: vocabularies that differ by padding share
    their numbers.

    Args:
        seed: The key, in [0, 2**64).
        position: The absolute position that they are for.
        size: V.
        purpose: ``TARGET`` or ``DRAFT``.
    """
    bits = _generator(seed, position, purpose, 0).random_raw(size) >> np.uint64(12)
    # 52 bits and a half: in (0, 1), both ends excluded, without a rounding.
    return torch.from_numpy(-np.log((bits + 0.5) * 2.0**-52))


class PositionNoise:
    """The ``exponentials`` of a text's positions, kept while they can be asked for again.

    Args:
        seed: The key.
        purpose: ``TARGET`` or ``DRAFT``.
    """

    def __init__(self, seed: int, *, purpose: int = TARGET) -> None:
        self._seed = seed
        self._purpose = purpose
        self._rows: dict[tuple[int, Any], Tensor] = {}

    def rows(self, positions: Sequence[int], *, like: Tensor) -> Tensor:
        """Return the numbers of R positions, [R, V].

        Args:
            positions: Length R. What lies before the first of them is forgotten: a text only grows.
            like: [R, V]; the result has its V, its dtype and its device.
        """
        first, size = min(positions), like.shape[-1]
        form = (size, like.dtype, like.device)
        self._rows = {key: row for key, row in self._rows.items() if key[0] >= first}
        for position in dict.fromkeys(positions):
            if (position, form) not in self._rows:
                row = exponentials(self._seed, position, size, purpose=self._purpose)
                self._rows[position, form] = row.to(like.device, like.dtype)
        return torch.stack([self._rows[position, form] for position in positions])


def _generator(seed: int, position: int, purpose: int, draw: int) -> np.random.Philox:
    # The lowest 64 bits of the counter run on within one generator.
    return np.random.Philox(key=seed, counter=(position << 64) + (draw << 128) + (purpose << 192))
