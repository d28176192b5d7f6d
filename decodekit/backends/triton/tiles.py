"""The sizes that the ``triton`` backend's kernel is compiled in, and the choice among them.

What a size is worth depends on the GPU, so a few are timed on it, once for each kind of step.

Shapes: R rows, G query heads of a kv head, D head dim, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import torch

__all__ = ["Tile", "TileTuner", "bucket_of_keys", "bucket_of_pairs", "tiles"]

_NEARLY = 1.05  # a tile has to be faster than an earlier one by more than times differ by chance


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program computes scores.

    Attributes:
        pairs: BLOCK_M, pairs of a row and a query head: a power of two of 16 or more.
        keys: BLOCK_N, keys at a time: a power of two of 16 or more.
        warps: Warps of 32 threads.
        stages: Loads of keys under way at once.
    """

    pairs: int
    keys: int
    warps: int
    stages: int


def tiles(pairs: int, width: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles worth trying, the one to use untried first; all give the same attention.

    Args:
        pairs: R x G, the rows of a product.
        width: D.
        dtype: Of the states.
    """
    narrow = dtype != torch.float32
    most = 128 if narrow and width <= 128 else 32
    block = min(max(16, 1 << (pairs - 1).bit_length()), most)
    keys = (64 if width <= 128 else 32) // (1 if narrow else 2)
    first = Tile(block, keys, warps=4 if block <= 64 else 8, stages=2)
    tried = [
        first,
        replace(first, stages=3),
        replace(first, keys=2 * keys),
        replace(first, keys=2 * keys, warps=8),
    ]
    if block > 64:
        tried.append(replace(first, pairs=block // 2, warps=4))
    return tuple(dict.fromkeys(tried))


def bucket_of_pairs(pairs: int) -> int:
    """Return which numbers of R x G are tuned together: up to 16, 32, 64, ..., more than 1024."""
    return min(max(4, (pairs - 1).bit_length()), 11)


def bucket_of_keys(keys: int) -> int:
    """Return which S are tuned together: below 256, 1024, 4096, ..."""
    return max(4, (keys.bit_length() + 1) // 2)


class TileTuner:
    """Remembers the fastest tile of each kind of step, so that a process always takes the same.

    Threads may share it.

    Args:
        seconds_of: Returns how long a call takes, in any unit.
        refusals: What running a tile raises that does not fit the GPU.
    """

    def __init__(
        self,
        seconds_of: Callable[[Callable[[], object]], float],
        refusals: tuple[type[Exception], ...],
    ) -> None:
        self._seconds_of = seconds_of
        self._refusals = refusals
        self._best: dict[Hashable, Tile] = {}
        self._lock = Lock()

    def best(self, kind: Hashable, tried: Sequence[Tile], run: Callable[[Tile], object]) -> Tile:
        """Return the tile for steps of ``kind``, timed on the first of them.

        Args:
            kind: What steps that are tuned together have in common.
            tried: The tiles; of those that are about as fast as the fastest the first is taken,
                and the very first if none fits.
            run: Runs the step with a tile, as often as is asked for.
        """
        with self._lock:
            if kind not in self._best:
                self._best[kind] = self._fastest(tried, run)
            return self._best[kind]

    def _fastest(self, tried: Sequence[Tile], run: Callable[[Tile], object]) -> Tile:
        times: dict[Tile, float] = {}
        for tile in tried:
            try:
                times[tile] = self._seconds_of(lambda tile=tile: run(tile))  # type: ignore[misc]
            except self._refusals:
                continue
        enough = _NEARLY * min(times.values(), default=0.0)
        return next((tile for tile, time in times.items() if time <= enough), tried[0])
