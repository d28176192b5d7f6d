"""Intervals without an assumption about the distribution: the percentile bootstrap.

Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics 7 (1979).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["RESAMPLES", "Interval", "bootstrap_interval", "quantile"]

RESAMPLES = 2000
"""Resamples of an interval where nobody says."""


class Interval(NamedTuple):
    """Where a figure would lie if the sample were drawn again."""

    low: float
    high: float


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of ``values`` below which ``share`` of them lie.

    Between two values it is interpolated linearly (Hyndman and Fan's type 7).

    Args:
        values: One or more, in any order.
        share: 0 to 1.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def bootstrap_interval(
    count: int,
    statistic: Callable[[Sequence[int]], float],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Return the percentile bootstrap interval of a statistic of ``count`` independent things.

    The same arguments always give the same interval: the draws are from a generator of its own.
    With few things such an interval is too narrow; from 5 on it says something.

    Args:
        count: How many things were measured: prompts, say, and not runs, as the runs of one prompt
            are not independent.
        statistic: The figure for the things at these places, 0 to ``count - 1``; a place may come
            several times.
        level: The share of resamples inside the interval.
        resamples: How often ``count`` places are drawn with replacement.
        seed: Seed of the draws.

    Returns:
        The interval; None if there are fewer than two things, from which nothing follows.
    """
    if count < 2:
        return None
    generator = random.Random(seed)
    places = range(count)
    figures = sorted(statistic(generator.choices(places, k=count)) for _ in range(resamples))
    tail = (1 - level) / 2
    return Interval(quantile(figures, tail), quantile(figures, 1 - tail))
