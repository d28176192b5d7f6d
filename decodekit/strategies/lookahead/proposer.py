"""Lookahead decoding (Fu et al., 2024, arXiv 2402.02057).

A step's tree is the union of a window of Jacobi iterations (see ``window``) and the candidates: the
pool's continuations of the anchor. They share nodes with the window and with each other where they
agree. The window's n-grams go to the pool after every step, and so can those of the prompt and of
the accepted text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from decodekit.errors import require_at_least, require_nodes
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import Budget, NGramPool, Parts, Proposal, StepOutcome
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.strategies.lookahead.window import JacobiWindow

__all__ = ["Lookahead", "LookaheadConfig", "LookaheadProposer"]


@dataclass(kw_only=True)
class LookaheadConfig:
    """Settings of ``strategy=lookahead``.

    The defaults are what a CPU can afford, about 9 rows a step. A GPU runs far more rows in the
    time of one; there the paper's 15, 5 and 15 save more steps.

    Attributes:
        window_size: Columns of the window, W.
        ngram_size: Length of an n-gram, N; the window has N-1 levels.
        max_candidates: Most candidates of a step, G; 0 uses the window alone.
        prompt_ngrams: Whether the n-grams of the prompt go to the pool.
        accepted_ngrams: Whether the n-grams of the accepted text go to the pool.
        realign: Whether the window's columns move by as many places as were accepted; otherwise
            they move by one, as in the reference implementation.
        pool: The name of an n-gram pool.
        max_keys: Most tokens under which the pool keeps n-grams.

    Raises:
        ConfigError: A value is out of its range.
    """

    name: str = "lookahead"
    window_size: int = 2
    ngram_size: int = 4
    max_candidates: int = 2
    prompt_ngrams: bool = True
    accepted_ngrams: bool = True
    realign: bool = False
    pool: str = "recent"
    max_keys: int = 65_536

    def __post_init__(self) -> None:
        require_at_least(self.window_size, 1, key="strategy.window_size")
        require_at_least(self.ngram_size, 2, key="strategy.ngram_size")
        require_at_least(self.max_candidates, 0, key="strategy.max_candidates")
        require_at_least(self.max_keys, 1, key="strategy.max_keys")
        require_nodes(self.max_nodes, "window_size, ngram_size and max_candidates")

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree: the window, without its first cell, and the candidates."""
        levels = self.ngram_size - 1
        return self.window_size * levels - 1 + self.max_candidates * levels


class Lookahead:
    """Makes lookahead proposers.

    Args:
        config: The settings.
        parts: Makes the n-gram pools.
    """

    def __init__(self, config: LookaheadConfig, parts: Parts) -> None:
        self.config = config
        self._parts = parts
        self.max_nodes = config.max_nodes
        self._new_pool()  # an unknown pool is refused now, not by the first request

    def new_proposer(self, params: SamplingParams) -> LookaheadProposer:
        """Return a proposer for one sequence, with a pool of its own."""
        return LookaheadProposer(self.config, self._new_pool())

    def _new_pool(self) -> NGramPool:
        config = self.config
        return self._parts.new_pool(
            config.pool, per_key=config.max_candidates, max_keys=config.max_keys
        )


class LookaheadProposer:
    """The window and the pool of one sequence.

    Args:
        config: The settings.
        pool: An empty pool.
    """

    def __init__(self, config: LookaheadConfig, pool: NGramPool) -> None:
        self._config = config
        self._pool = pool
        self._window: JacobiWindow | None = None
        self._top: list[int] = []  # the window's top cells in the last proposal, if it was in it
        self._entered = 0  # committed tokens whose n-grams are in the pool
        # Guesses need no good randomness, but they must not touch the global generator, and two
        # runs of one prompt must be alike.
        self._random = random.Random(0)

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return the window and the candidates, or what of them fits the budget."""
        self._enter_text(committed)
        self._top = []
        if budget.useful_depth < 1:
            return Proposal()
        if self._window is None:
            self._window = self._new_window(committed)
        candidates = TokenTree.from_paths(self._candidates(committed[-1])).limited(
            nodes=budget.nodes, depth=budget.useful_depth
        )
        tree, (places, _) = TokenTree.merge([self._window.tree(), candidates])
        if len(tree) > budget.nodes or self._window.top_depth > budget.depth:
            return Proposal(candidates)  # at the very end of the context
        self._top = [node if node == ROOT else places[node] for node in self._window.top_nodes()]
        return Proposal(tree)

    def observe(self, outcome: StepOutcome) -> None:
        """Move the window on by one iteration and put its n-grams into the pool."""
        if not self._top or self._window is None:
            return
        iterate = outcome.target.guess_many(self._top)
        for key, continuation in self._window.ngrams(outcome.plan.pending[-1], iterate):
            self._pool.insert(key, continuation)
        shift = len(outcome.tokens) if self._config.realign else 1
        self._window.advance(iterate, shift=shift)

    def _candidates(self, anchor: int) -> list[tuple[int, ...]]:
        return self._pool.lookup(anchor)[: self._config.max_candidates]

    def _new_window(self, committed: Sequence[int]) -> JacobiWindow:
        """Return a window of tokens drawn from the text so far."""

        def guess() -> int:
            return self._random.choice(committed)

        first = [guess() for _ in range(self._config.window_size)]
        return JacobiWindow(first, levels=self._config.ngram_size - 1, guess=guess)

    def _enter_text(self, committed: Sequence[int]) -> None:
        """Put the n-grams that end in tokens committed since the last call into the pool."""
        config, size = self._config, self._config.ngram_size
        wanted = config.accepted_ngrams if self._entered else config.prompt_ngrams
        if wanted:
            for end in range(max(self._entered + 1, size), len(committed) + 1):
                self._pool.insert(committed[end - size], tuple(committed[end - size + 1 : end]))
        self._entered = len(committed)
