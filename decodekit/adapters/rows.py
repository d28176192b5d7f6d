"""The rows of a batch of step plans, as an adapter needs them."""

from __future__ import annotations

from collections.abc import Sequence

from decodekit.errors import GenerationError
from decodekit.interfaces.plan import StepPlan

__all__ = ["check_prefixes", "padded_rows"]


def check_prefixes(plans: Sequence[StepPlan], lengths: tuple[int, ...]) -> None:
    """Check that plans are for a cache with ``lengths`` committed rows per sequence.

    Raises:
        GenerationError: They are not.
    """
    prefixes = tuple(plan.prefix for plan in plans)
    if prefixes != lengths:
        raise GenerationError(
            f"plans for prefixes {list(prefixes)} do not fit a cache that holds "
            f"{list(lengths)} rows"
        )


def padded_rows(plans: Sequence[StepPlan]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the tokens and the positions of B plans, [B][R] each, padded to the widest.

    A narrow plan is padded with its last row: a valid token at a valid position.
    """
    width = max(plan.rows for plan in plans)

    def padded(values: tuple[int, ...]) -> tuple[int, ...]:
        return values + values[-1:] * (width - len(values))

    return [padded(plan.tokens) for plan in plans], [padded(plan.positions) for plan in plans]
