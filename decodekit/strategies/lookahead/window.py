"""The two-dimensional window of Jacobi iterations of lookahead decoding, as a token tree.

The window has W columns and up to N-1 levels. Cell (0, 0) is the anchor. The parent of (r, j) is
(r-1, j), that of (0, j) is (0, j-1), so a cell's depth is r + j: how far behind the anchor its
token is guessed to stand. The model's tokens after the cells of the top level are the next Jacobi
iterate, and column j read upwards, with the iterate's token at its end, is an N-gram.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from decodekit.interfaces.tree import ROOT, TokenTree

__all__ = ["JacobiWindow"]


class JacobiWindow:
    """The levels of one sequence's window; it fills up over the first N-2 steps.

    Args:
        first_level: The W tokens of level 0, any guess; the one in column 0 is not used.
        levels: Levels of the full window, N-1.
        guess: Makes a token for a cell about which nothing is known.
    """

    def __init__(
        self, first_level: Sequence[int], *, levels: int, guess: Callable[[], int]
    ) -> None:
        self._levels = [list(first_level)]
        self._full = levels
        self._guess = guess

    @property
    def width(self) -> int:
        """W, the number of columns."""
        return len(self._levels[0])

    @property
    def top_depth(self) -> int:
        """The depth of the deepest cell."""
        return len(self._levels) - 1 + self.width - 1

    def tree(self) -> TokenTree:
        """Return the cells but for the anchor: level 0 first, each level from left to right."""
        width = self.width
        tokens = self._levels[0][1:]
        parents = list(range(ROOT, width - 2))
        for level in range(1, len(self._levels)):
            tokens += self._levels[level]
            parents += [self._node(level - 1, column) for column in range(width)]
        return TokenTree(tuple(tokens), tuple(parents))

    def top_nodes(self) -> list[int]:
        """Return the nodes of the top level's cells in ``tree()``, ``ROOT`` for the anchor."""
        return [self._node(len(self._levels) - 1, column) for column in range(self.width)]

    def ngrams(self, anchor: int, iterate: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the n-gram of each column as its first token and what follows it.

        While the window fills up they are shorter than N.

        Args:
            anchor: The token of cell (0, 0).
            iterate: The model's token after each cell of the top level, length W.
        """
        for column, last in enumerate(iterate):
            first = self._levels[0][column] if column else anchor
            yield first, (*(level[column] for level in self._levels[1:]), last)

    def advance(self, iterate: Sequence[int], *, shift: int) -> None:
        """Take in the next iterate and move the columns.

        Args:
            iterate: The model's token after each cell of the top level, length W; becomes the top
                level. If the window is full, level 0 is dropped.
            shift: Places by which the anchor has moved; a dropped level accounts for one of them.
        """
        self._levels.append(list(iterate))
        if len(self._levels) > self._full:
            del self._levels[0]
            shift -= 1
        if shift > 0:
            self._levels = [self._moved(level, shift) for level in self._levels]

    def _moved(self, level: list[int], shift: int) -> list[int]:
        kept = level[shift:]
        return kept + [self._guess() for _ in range(len(level) - len(kept))]

    def _node(self, level: int, column: int) -> int:
        if level == 0:
            return column - 1  # the anchor, column 0, is ROOT
        return level * self.width + column - 1
