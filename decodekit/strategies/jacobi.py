"""Jacobi decoding (Santilli et al., 2023, arXiv 2305.10427): one guess at the next tokens, refined.

The guess is a chain of W tokens. After each step the model's own token after every node is the next
guess for that place; what was right is accepted, and the rest moves up to the new anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decodekit.errors import require_at_least, require_nodes
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import Budget, Proposal, StepOutcome
from decodekit.interfaces.tree import ROOT, TokenTree

__all__ = ["Jacobi", "JacobiConfig", "JacobiProposer"]


@dataclass(kw_only=True)
class JacobiConfig:
    """Settings of ``strategy=jacobi``.

    Attributes:
        window_size: Tokens guessed at a time, W.

    Raises:
        ConfigError: A value is out of its range.
    """

    name: str = "jacobi"
    window_size: int = 8

    def __post_init__(self) -> None:
        require_at_least(self.window_size, 1, key="strategy.window_size")
        require_nodes(self.window_size, "window_size")


class Jacobi:
    """Makes Jacobi proposers."""

    def __init__(self, config: JacobiConfig | None = None) -> None:
        self.config = config or JacobiConfig()
        self.max_nodes = self.config.window_size

    def new_proposer(self, params: SamplingParams) -> JacobiProposer:
        """Return a proposer for one sequence."""
        return JacobiProposer(self.config)


class JacobiProposer:
    """Iterates one chain."""

    def __init__(self, config: JacobiConfig) -> None:
        self._window_size = config.window_size
        self._guess: list[int] = []

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return the current guess, a chain of at most ``window_size`` tokens."""
        length = max(min(self._window_size, budget.nodes, budget.useful_depth), 0)
        # The first guess, and what a long accepted run leaves open, is the anchor repeated.
        filled = self._guess + [committed[-1]] * (length - len(self._guess))
        return Proposal(TokenTree.chain(filled[:length]))

    def observe(self, outcome: StepOutcome) -> None:
        """Take the model's tokens after every node as the next guess, from the new anchor on."""
        nodes = range(ROOT, len(outcome.proposal.tree))
        # Entry i is the model's token at depth i + 1; the last accepted token is the new anchor.
        iterate = outcome.target.guess_many(nodes)
        self._guess = iterate[len(outcome.tokens) :]
