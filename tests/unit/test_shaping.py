"""Rows are changed on their own prefix; what a caller brings along is checked when it answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import Decoder
from decodekit.errors import GenerationError
from decodekit.shaping import Shaper
from decodekit.strategies.autoregressive import Autoregressive
from decodekit.tree import ROOT, TokenTree
from tests.fakes import ToyAdapter

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


def test_a_row_is_asked_about_after_the_commit_on_its_own_prefix() -> None:
    """The list of committed tokens has grown by then."""
    seen: list[list[int]] = []

    def record(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.extend(input_ids.tolist())
        return scores

    shaper = Shaper([record])
    committed = [5, 6]
    shaper.begin(committed, TokenTree.chain([7, 8]), torch.zeros(3, 11))
    shaper.row(ROOT)
    shaper.commit(ROOT, 3)
    committed.append(3)
    shaper.row(0)
    shaper.row(0)
    assert seen == [[5, 6], [5, 6, 7]]


def test_no_graph_is_built_by_a_processor_with_parameters() -> None:
    layer = torch.nn.Parameter(torch.ones(11))
    shaper = Shaper([lambda _, scores: scores * layer])
    shaper.begin([5, 6], TokenTree(), torch.randn(1, 11))
    assert not shaper.row(ROOT).requires_grad
