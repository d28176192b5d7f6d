"""One decoding step before it is run: which rows, at which positions, under which mask."""

from __future__ import annotations

from dataclasses import dataclass

from decodekit.errors import GenerationError
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.tree import EMPTY_TREE, TokenTree

__all__ = ["StepPlan"]


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
