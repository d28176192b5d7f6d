"""One decoding step before it is run: which rows, at which positions, under which mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decodekit.errors import GenerationError
from decodekit.mask import TreeMask
from decodekit.tree import EMPTY_TREE, TokenTree

__all__ = ["StepPlan", "check_prefixes", "padded_rows"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one forward pass over one sequence.

    The rows are the pending tokens, then the tree's nodes. Prefill is a long ``pending`` with an
    empty tree, a plain step one pending token and a tree.

    Attributes:
        prefix: P, the number of committed tokens whose rows are in the cache already.
        pending: The committed tokens that are not, in order; the last is the anchor.
        tree: The guesses below the anchor.

    Raises:
        GenerationError: ``pending`` is empty, so there is no anchor.
    """

    prefix: int
    pending: tuple[int, ...]
    tree: TokenTree = EMPTY_TREE

    def __post_init__(self) -> None:
        if not self.pending:
            raise GenerationError("a step needs at least one pending token, its anchor")

    @property
    def rows(self) -> int:
        """R, the number of rows of the forward pass."""
        return len(self.pending) + len(self.tree)

    @property
    def anchor_row(self) -> int:
        """The row of the anchor; node ``i`` has the row ``anchor_row + 1 + i``."""
        return len(self.pending) - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token of each row, length R."""
        return self.pending + self.tree.tokens

    @property
    def positions(self) -> tuple[int, ...]:
        """The logical position of each row, length R."""
        anchor = self.prefix + self.anchor_row
        return (
            *range(self.prefix, anchor + 1),
            *(anchor + depth for depth in self.tree.depths),
        )

    def mask(self) -> TreeMask:
        """Return what each row sees."""
        lead, rows = len(self.pending), self.rows
        tin, tout = self.tree.intervals
        return TreeMask(
            prefix=self.prefix,
            tin=(*range(lead), *(lead + time for time in tin)),
            tout=(*(rows,) * lead, *(lead + time for time in tout)),
            positions=self.positions,
            lead=lead,
        )


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
