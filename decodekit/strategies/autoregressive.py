"""Autoregressive decoding: one token per forward pass, the baseline of every other strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import Budget, Proposal, StepOutcome

__all__ = ["Autoregressive", "AutoregressiveConfig"]


@dataclass(kw_only=True)
class AutoregressiveConfig:
    """Settings of ``strategy=autoregressive``: there are none."""

    name: str = "autoregressive"


class Autoregressive:
    """Proposes nothing, so that every step emits the bonus token alone.

    It keeps no state, so it is its own proposer.
    """

    max_nodes = 0

    def __init__(self, config: AutoregressiveConfig | None = None) -> None:
        self.config = config or AutoregressiveConfig()

    def new_proposer(self, params: SamplingParams) -> Autoregressive:
        """Return a proposer for one sequence."""
        return self

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return the empty tree."""
        return Proposal()

    def observe(self, outcome: StepOutcome) -> None:
        """Learn nothing."""
