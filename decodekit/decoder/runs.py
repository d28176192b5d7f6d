"""Runs of tokens, compared."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["first_difference"]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first place where two runs of tokens differ; None if they are equal."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))
