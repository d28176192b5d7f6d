"""The empty proposal."""

from __future__ import annotations

from decodekit.interfaces import Budget, Proposal, Proposer
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.strategies.autoregressive import Autoregressive, AutoregressiveConfig


def test_nothing_is_proposed_and_no_scratch_rows_are_needed() -> None:
    strategy = Autoregressive()
    assert strategy.max_nodes == 0
    assert strategy.config == AutoregressiveConfig(name="autoregressive")
    proposer = strategy.new_proposer(SamplingParams())
    assert isinstance(proposer, Proposer)
    assert proposer.propose([1], Budget(nodes=9, depth=9, tokens=9)) == Proposal()
