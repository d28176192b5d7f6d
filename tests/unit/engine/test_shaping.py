"""Rows are changed on their own prefix; what a caller brings along is checked when it answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import Decoder
from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.shaping import Shaper
from decodekit.errors import ConfigError, GenerationError
from decodekit.interfaces import Accepted, Proposal, StepOutcome, TargetTokens
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.strategies.autoregressive import Autoregressive
from decodekit.testing import check_verifier
from tests.support.fakes import Given, RandomProposer, ToyAdapter

PROMPT = [3, 1, 4, 1, 5]


class Even:
    """Only tokens with even ids."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults

    def fork(self) -> Any:
        return self.faults.get("fork", self)

    def advance(self, token: int) -> Any:
        return self.faults.get("advance", token % 2 == 0)

    def mask(self) -> Any:
        return self.faults.get("mask", torch.arange(11) % 2 == 0)


def generate(**options: Any) -> list[int]:
    return (
        Decoder(ToyAdapter(), strategy=Autoregressive())
        .generate(PROMPT, max_new_tokens=6, **options)
        .tokens
    )


def test_a_constraint_rules_out_what_it_masks() -> None:
    assert all(token % 2 == 0 for token in generate(constraint=Even()))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"fork": None}, r"fork\(\) of Even must return a copy of it"),
        ({"advance": None}, r"Even does not allow with advance\(\) what it allows with mask"),
        ({"mask": [True] * 11}, r"Even must return a bool mask of shape \[11\]"),
        ({"mask": torch.ones(11)}, r"Even must return a bool mask of shape \[11\]"),
        ({"mask": torch.ones(1, dtype=torch.bool)}, r"Even must return a bool mask of shape"),
        ({"mask": torch.zeros(11, dtype=torch.bool)}, "leave no token to choose from"),
    ],
)
def test_a_faulty_constraint_is_named(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        generate(constraint=Even(**fault))


class Faulty:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def fork(self) -> Any:
        return None if self.answer == "no fork" else self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return self.answer(scores)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("no fork", r"fork\(\) of Faulty must return a copy of it"),
        (lambda _: None, r"Faulty must return scores of shape \[1, 11\]"),
        (lambda scores: scores[0], r"Faulty must return scores of shape \[1, 11\]"),
        (lambda scores: scores.long(), "Faulty must return scores .* in floating point"),
        (lambda scores: scores + torch.inf, "Faulty returned NaN or infinite scores"),
        (lambda scores: scores * torch.nan, "Faulty returned NaN or infinite scores"),
    ],
)
def test_a_faulty_processor_is_named(answer: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        generate(logits_processor=Faulty(answer))


class Everywhere:
    """A verifier of exact matching that asks about every node, and in any order."""

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        for node in reversed(range(len(proposal.tree))):
            target.after(node)
        return ExactMatchVerifier().verify(proposal, target)


class Declared(Everywhere):
    in_order = False


class Plain:
    """Keeps a state: the number of its calls; some of them change the scores."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores if self.calls % 3 else scores.roll(2, dims=-1)


class Forked(Plain):
    def fork(self) -> Forked:
        return copy.copy(self)


def in_any_order(verifier: Any, processor: Any) -> list[int]:
    oracle = Given(lambda: RandomProposer(seed=3, vocab_size=11, nodes=8), 8)
    decoder = Decoder(ToyAdapter(), strategy=oracle, verifier=verifier)
    return decoder.generate(PROMPT, max_new_tokens=12, logits_processor=processor).tokens


def test_a_verifier_that_asks_in_any_order_needs_fork_and_says_so_by_name() -> None:
    check_verifier(Declared())
    with pytest.raises(ConfigError, match=r"logits processor Plain has no fork\(\)") as caught:
        in_any_order(Declared(), Plain())
    assert caught.value.key == "logits_processor"
    assert in_any_order(Declared(), Forked()) == in_any_order(ExactMatchVerifier(), Plain())


def test_a_verifier_that_asks_in_any_order_unannounced_is_found_out() -> None:
    """What it asks about beside the text must not reach a processor."""
    with pytest.raises(GenerationError, match=r"not the next of the text.* in_order = False"):
        in_any_order(Everywhere(), Plain())


def test_a_strategy_that_asks_about_every_node_afterwards_calls_no_processor() -> None:
    class Curious(RandomProposer):
        def observe(self, outcome: StepOutcome) -> None:
            nodes = range(len(outcome.proposal.tree))
            assert outcome.target.after_many(nodes) == outcome.target.guess_many(nodes)

    text = in_any_order(ExactMatchVerifier(), Plain())
    made = Given(lambda: Curious(seed=3, vocab_size=11, nodes=8), 8)
    decoder = Decoder(ToyAdapter(), strategy=made)
    plain = Plain()
    assert decoder.generate(PROMPT, max_new_tokens=12, logits_processor=plain).tokens == text
    assert plain.calls == 12


def test_no_graph_is_built_by_a_processor_with_parameters() -> None:
    layer = torch.nn.Parameter(torch.ones(11))
    shaper = Shaper([lambda _, scores: scores * layer])
    shaper.begin([5, 6], TokenTree(), torch.randn(1, 11))
    assert not shaper.row(ROOT).requires_grad
