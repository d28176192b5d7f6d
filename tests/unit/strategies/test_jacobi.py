"""Jacobi decoding against an iteration written out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.runner import LocalRunner
from decodekit.engine.sampling import make_sampler
from decodekit.engine.stopping import StopRules
from decodekit.errors import ConfigError
from decodekit.interfaces import Budget, Proposer
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import TokenTree
from decodekit.strategies.jacobi import Jacobi, JacobiConfig, JacobiProposer
from tests.support.fakes import ToyAdapter, decode_one

WIDE = Budget(nodes=100, depth=100, tokens=100)
PROMPT = [3, 1, 4]
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=4)


class Recorded(JacobiProposer):
    """Keeps what it proposed."""

    def __init__(self, config: JacobiConfig) -> None:
        super().__init__(config)
        self.chains: list[list[int]] = []

    def propose(self, committed: Sequence[int], budget: Budget):  # type: ignore[no-untyped-def]
        proposal = super().propose(committed, budget)
        assert proposal.tree == TokenTree.chain(proposal.tree.tokens)
        assert proposal.draft_probs is None
        self.chains.append(list(proposal.tree.tokens))
        return proposal


def run(
    model: ToyAdapter, window_size: int, *, params: SamplingParams = GREEDY, tokens: int = 20
) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Return the proposed chains and the emitted runs."""
    proposer = Recorded(JacobiConfig(window_size=window_size))
    records = decode_one(
        PROMPT,
        runner=LocalRunner(model),
        proposer=proposer,
        verifier=ExactMatchVerifier(),
        sampler=make_sampler(params),
        rules=StopRules(max_new_tokens=tokens),
        max_nodes=window_size,
    )
    runs = [record.tokens for record in records]
    return proposer.chains, runs


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window_size", [1, 2, 5, 9])
def test_every_chain_is_the_jacobi_iterate(window_size: int, params: SamplingParams) -> None:
    model = ToyAdapter(5, seed=1, context=2)
    chains, runs = run(model, window_size, params=params)
    sampler = make_sampler(params)
    text, guess = list(PROMPT), [PROMPT[-1]] * window_size
    for chain, emitted in zip(chains, runs, strict=True):
        left = len(PROMPT) + 20 - len(text)
        assert chain == guess[: left - 1]  # what can still be accepted
        # The model's token after every beginning of the guess.
        iterate = [
            sampler.choose(model.logits_after(text + guess[:n])[None], [len(text) + n])[0]
            for n in range(window_size + 1)
        ]
        right = 0
        while right < window_size and guess[right] == iterate[right]:
            right += 1
        assert list(emitted) == iterate[: right + 1][:left]
        text += emitted
        guess = iterate[right + 1 :]
        guess += [text[-1]] * (window_size - len(guess))
    assert len(text) == len(PROMPT) + 20


def test_a_text_that_repeats_itself_takes_fewer_steps_than_tokens() -> None:
    _, runs = run(ToyAdapter(6, seed=2, context=1), 8)
    assert sum(map(len, runs)) == 20
    assert len(runs) <= 6


@pytest.mark.parametrize(
    ("budget", "length"),
    [
        (WIDE, 4),
        (Budget(nodes=3, depth=100, tokens=100), 3),
        (Budget(nodes=100, depth=2, tokens=100), 2),
        (Budget(nodes=100, depth=100, tokens=2), 1),
        (Budget(nodes=100, depth=100, tokens=1), 0),
        (Budget(nodes=0, depth=0, tokens=9), 0),
    ],
)
def test_a_chain_is_as_long_as_the_budget_lets_it_be(budget: Budget, length: int) -> None:
    proposer = Jacobi(JacobiConfig(window_size=4)).new_proposer(SamplingParams())
    assert proposer.propose([1, 7], budget).tree == TokenTree.chain([7] * length)


def test_every_sequence_has_a_proposer_of_its_own() -> None:
    strategy = Jacobi()
    assert strategy.max_nodes == strategy.config.window_size == JacobiConfig().window_size == 8
    one, other = strategy.new_proposer(SamplingParams()), strategy.new_proposer(SamplingParams())
    assert isinstance(one, Proposer)
    assert one is not other


@pytest.mark.parametrize("window_size", [0, -3])
def test_a_window_of_nothing_is_refused(window_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        JacobiConfig(window_size=window_size)
    assert str(caught.value) == f"window_size must be 1 or more, not {window_size}"
    assert (caught.value.key, caught.value.value) == ("strategy.window_size", window_size)
