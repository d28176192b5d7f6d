"""``check_proposer``: the built-in strategies pass, and each law catches one that breaks it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from decodekit.config.plugins.installed import registry
from decodekit.decoder.build import build_adapter, build_strategy
from decodekit.interfaces import Budget, Proposal, StepOutcome
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import TokenTree
from decodekit.testing import ToyAdapter, check_proposer
from tests.support.tiny import tiny_model


@pytest.mark.parametrize(
    "settings",
    [
        *({"name": name} for name in registry().names("strategy") if name != "draft_model"),
        {"name": "lookahead", "window_size": 5, "ngram_size": 5, "realign": True},
    ],
    ids=lambda settings: f"{settings['name']}{len(settings)}",
)
def test_the_built_in_strategies_keep_every_law(settings: Any) -> None:
    check_proposer(build_strategy(settings))


def test_a_strategy_that_has_to_know_its_model_is_given_one() -> None:
    settings = {"name": "draft_model", "model": tiny_model(seed=1), "num_tokens": 2}
    check_proposer(build_strategy(settings), adapter=build_adapter(tiny_model()), max_new_tokens=6)


class Chains:
    """A sound strategy to be broken: proposes the last tokens again."""

    max_nodes = 4

    def new_proposer(self, params: SamplingParams) -> Any:
        return self

    def propose(self, committed: Sequence[int], budget: Budget) -> Any:
        chain = TokenTree.chain(committed[-4:])
        return Proposal(chain.limited(nodes=budget.nodes, depth=budget.depth))

    def observe(self, outcome: StepOutcome) -> None:
        pass


def test_the_strategy_that_is_broken_below_is_sound() -> None:
    check_proposer(Chains())


class NoProposer(Chains):
    def new_proposer(self, params: SamplingParams) -> Any:
        return object()


class Negative(Chains):
    max_nodes = -1


class TooMany(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        chain = TokenTree.chain(list(committed[-4:]) or [0])
        return Proposal(chain.limited(nodes=max(budget.nodes, 1), depth=max(budget.depth, 1)))


class TooDeep(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        return Proposal(TokenTree.chain(committed[-4:]).limited(nodes=budget.nodes, depth=99))


class Changes(Chains):
    def propose(self, committed: Any, budget: Budget) -> Proposal:
        committed[-1] = 0
        return Proposal()


class ChangesLater(Chains):
    def observe(self, outcome: Any) -> None:
        outcome.committed.append(0)


class Outside(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        return Proposal(TokenTree.chain([11]).limited(nodes=budget.nodes, depth=budget.depth))


class Tensors(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        tree = TokenTree.chain([torch.tensor(1)])  # type: ignore[list-item]
        return Proposal(tree.limited(nodes=budget.nodes, depth=budget.depth))


class Bare(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Any:
        return super().propose(committed, budget).tree


class Raises(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        return Proposal(TokenTree.chain([committed[-2]][: budget.useful_depth]))


class RaisesLater(Chains):
    def observe(self, outcome: StepOutcome) -> None:
        assert outcome.accepted == ()


class GlobalRandom(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        random.random()
        return Proposal()


class GlobalTorchRandom(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        torch.rand(1)
        return Proposal()


class GlobalNumpyRandom(Chains):
    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        np.random.rand()
        return Proposal()


class Shared(Chains):
    """All proposers learn into one memory."""

    def __init__(self) -> None:
        self.memory: list[int] = [0] * 4

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        chain = TokenTree.chain(self.memory[-4:])
        return Proposal(chain.limited(nodes=budget.nodes, depth=budget.depth))

    def observe(self, outcome: StepOutcome) -> None:
        self.memory.extend(outcome.tokens)


class Probabilities(Chains):
    values: Any = None

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        tree = TokenTree.chain([1]).limited(nodes=budget.nodes, depth=budget.depth)
        return Proposal(tree, self.values[: len(tree)])


class WrongShape(Probabilities):
    values = torch.full((1, 4), 0.25)


class WrongSum(Probabilities):
    values = torch.full((1, 11), 0.25)


class Impossible(Probabilities):
    values = torch.eye(11)[:1]


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (object, "a strategy has max_nodes and new_proposer"),
        (NoProposer, "a proposer has propose and observe"),
        (Negative, "max_nodes is a number of nodes"),
        (TooMany, "a proposal keeps to budget.nodes"),
        (TooDeep, "it keeps to budget.depth"),
        (Changes, "propose does not change committed"),
        (ChangesLater, "observe does not change committed"),
        (Outside, "its tokens are whole numbers from 0 to 10"),
        (Tensors, "its tokens are whole numbers from 0 to 10"),
        (Bare, "propose returns a Proposal"),
        (Raises, "propose does not raise; IndexError: list index out of range"),
        (RaisesLater, "observe does not raise; AssertionError"),
        (GlobalRandom, "the global random generators are left alone"),
        (GlobalTorchRandom, "the global random generators are left alone"),
        (GlobalNumpyRandom, "the global random generators are left alone"),
        (Shared, "a proposer guesses the same beside another one"),
        (WrongShape, r"draft_probs are \[T, V\]"),
        (WrongSum, "draft_probs are distributions"),
        (Impossible, "a drawn token has a probability"),
    ],
)
def test_a_broken_strategy_is_caught_by_the_law_that_it_breaks(broken: Any, expected: str) -> None:
    with pytest.raises(AssertionError, match=f"^broken law: {expected}"):
        check_proposer(broken())


def test_a_text_that_is_not_that_of_plain_decoding_is_caught() -> None:
    """Trees cannot bring that about, but a model that answers differently under trees does."""

    class Fickle(ToyAdapter):
        def forward(self, plans: Any, cache: Any) -> Any:
            logits = super().forward(plans, cache)
            return [
                rows.flip(-1) if len(plan.tree) == 4 else rows
                for plan, rows in zip(plans, logits, strict=True)
            ]

    with pytest.raises(AssertionError, match="the text is that of plain decoding"):
        check_proposer(Chains(), adapter=Fickle())
