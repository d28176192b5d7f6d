"""``strategy=words``: a word goes on as the last one did that began with the same letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decodekit import SamplingParams, TokenTree
from decodekit.interfaces import Budget, Proposal, StepOutcome

if TYPE_CHECKING:
    from decodekit_example import WordsConfig

__all__ = ["WordProposer", "Words"]

_SPACE = frozenset(b" \n\t")


class Words:
    """Makes proposers that know the words of their own text.

    Args:
        config: The settings.
    """

    def __init__(self, config: WordsConfig) -> None:
        self.config = config
        self.max_nodes = config.num_tokens

    def new_proposer(self, params: SamplingParams) -> WordProposer:
        """Return a proposer for one sequence."""
        return WordProposer(self.config)


class WordProposer:
    """Remembers how the words of one text go on.

    Args:
        config: The settings.
    """

    def __init__(self, config: WordsConfig) -> None:
        self._config = config
        self._after: dict[tuple[int, ...], int] = {}  # the start of a word -> what comes after it
        self._start = self._read = 0

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return the rest of the word, and of those after it that began alike."""
        for place in range(self._read, len(committed)):
            if place > self._start:
                begun = tuple(committed[self._start : place])
                if len(begun) >= self._config.min_letters:
                    self._after[begun] = place
            if committed[place] in _SPACE:
                self._start = place + 1
        self._read = len(committed)
        source = self._after.get(tuple(committed[self._start :]))
        if source is None:
            return Proposal()
        chain = TokenTree.chain(committed[source : source + self._config.num_tokens])
        return Proposal(chain.limited(nodes=budget.nodes, depth=budget.useful_depth))

    def observe(self, outcome: StepOutcome) -> None:
        """Learn nothing: the text itself is read at the next call."""
