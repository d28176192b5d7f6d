"""Prompt lookup: guess that what followed these tokens before follows them again.

Saxena (2023), "Prompt Lookup Decoding". The draft is one chain, copied from the committed tokens
after the longest and most recent earlier occurrence of their own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decodekit.errors import ConfigError, require_at_least, require_nodes
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import Budget, Proposal, StepOutcome
from decodekit.interfaces.tree import TokenTree

__all__ = ["PromptLookup", "PromptLookupConfig", "PromptLookupProposer"]


@dataclass(kw_only=True)
class PromptLookupConfig:
    """Settings of ``strategy=prompt_lookup``.

    Attributes:
        num_tokens: Tokens of a draft.
        max_ngram_size: Longest end of the text that is looked for.
        min_ngram_size: Shortest end of the text that is looked for.

    Raises:
        ConfigError: A value is out of its range.
    """

    name: str = "prompt_lookup"
    num_tokens: int = 10
    max_ngram_size: int = 3
    min_ngram_size: int = 1

    def __post_init__(self) -> None:
        require_at_least(self.num_tokens, 1, key="strategy.num_tokens")
        require_nodes(self.num_tokens, "num_tokens")
        require_at_least(self.min_ngram_size, 1, key="strategy.min_ngram_size")
        if self.max_ngram_size < self.min_ngram_size:
            raise ConfigError(
                f"max_ngram_size ({self.max_ngram_size}) must not be below min_ngram_size "
                f"({self.min_ngram_size})",
                key="strategy.max_ngram_size",
                value=self.max_ngram_size,
            )


class PromptLookup:
    """Makes prompt-lookup proposers."""

    def __init__(self, config: PromptLookupConfig | None = None) -> None:
        self.config = config or PromptLookupConfig()
        self.max_nodes = self.config.num_tokens

    def new_proposer(self, params: SamplingParams) -> PromptLookupProposer:
        """Return a proposer for one sequence."""
        return PromptLookupProposer(self.config)


class PromptLookupProposer:
    """Copies from one sequence's own past."""

    def __init__(self, config: PromptLookupConfig) -> None:
        self._config = config
        # Where each n-gram was last followed by something: the place after its last token. Each
        # committed token is entered once, so a lookup does not scan the text.
        self._ends: dict[tuple[int, ...], int] = {}
        self._entered = 0

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return the chain after the longest, then most recent, match; empty if there is none."""
        self._enter(committed)
        length = min(self._config.num_tokens, budget.nodes, budget.useful_depth)
        if length < 1:
            return Proposal()
        for size in range(self._config.max_ngram_size, self._config.min_ngram_size - 1, -1):
            start = self._ends.get(tuple(committed[-size:])) if size <= len(committed) else None
            if start is not None:
                return Proposal(TokenTree.chain(self._copy(committed, start, length)))
        return Proposal()

    def observe(self, outcome: StepOutcome) -> None:
        """Learn nothing: the committed tokens are read when the next draft is made."""

    def _enter(self, committed: Sequence[int]) -> None:
        """Enter the n-grams that end before the last token, which nothing follows yet."""
        for end in range(max(self._entered, 1), len(committed)):
            for size in range(self._config.min_ngram_size, self._config.max_ngram_size + 1):
                if size <= end:
                    self._ends[tuple(committed[end - size : end])] = end
        self._entered = len(committed)

    @staticmethod
    def _copy(committed: Sequence[int], start: int, length: int) -> list[int]:
        """Copy ``length`` tokens from ``start``; past the end, go on with what was copied.

        A match that ends near the end of the text means that the text repeats itself.
        """
        period = len(committed) - start
        return [committed[start + index % period] for index in range(length)]
