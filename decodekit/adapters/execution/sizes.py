"""The few numbers of rows that passes are compiled and recorded for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["ROWS", "rounded_rows"]

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""The numbers of rows; a pass with more runs as it is."""


def rounded_rows(rows: int, sizes: Sequence[int] = ROWS) -> int | None:
    """Return the least of ``sizes``, which ascend, that ``rows`` fit in; None if there is none."""
    place = bisect_left(sizes, rows)
    return None if place == len(sizes) else sizes[place]
