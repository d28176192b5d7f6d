"""Prompt lookup by example; ``tests/property/test_prompt_lookup_laws.py`` scans for matches."""

from __future__ import annotations

import pytest

from decodekit.errors import ConfigError
from decodekit.interfaces import Budget, Proposer
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import TokenTree
from decodekit.strategies.prompt_lookup import PromptLookup, PromptLookupConfig

WIDE = Budget(nodes=100, depth=100, tokens=100)


def draft(
    text: list[int],
    *,
    budget: Budget = WIDE,
    num_tokens: int = 4,
    longest: int = 3,
    shortest: int = 1,
) -> list[int]:
    config = PromptLookupConfig(
        num_tokens=num_tokens, max_ngram_size=longest, min_ngram_size=shortest
    )
    tree = PromptLookup(config).new_proposer(SamplingParams()).propose(text, budget).tree
    assert tree == TokenTree.chain(tree.tokens)
    return list(tree.tokens)


def test_what_followed_before_is_guessed_again() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]


def test_nothing_is_guessed_without_a_match() -> None:
    assert draft([1, 2, 3, 4]) == []
    assert draft([1]) == []


def test_the_longest_match_goes_before_a_later_one() -> None:
    # "2 3" was followed by 4; "3" alone, more recently, by 9.
    assert draft([2, 3, 4, 0, 3, 9, 0, 2, 3], num_tokens=1) == [4]
    assert draft([2, 3, 4, 0, 3, 9, 0, 2, 3], num_tokens=1, longest=1) == [9]


def test_of_equal_matches_the_most_recent_is_taken() -> None:
    assert draft([1, 2, 5, 1, 2, 6, 1, 2], num_tokens=1) == [6]


def test_a_match_shorter_than_the_shortest_is_none() -> None:
    assert draft([1, 5, 2, 1], shortest=2) == []
    assert draft([1, 5, 2, 1], shortest=1) == [5, 2, 1, 5]


def test_a_copy_that_runs_into_the_end_goes_on_with_itself() -> None:
    assert draft([7, 1, 2, 1, 2], num_tokens=7) == [1, 2, 1, 2, 1, 2, 1]
    assert draft([5, 5], num_tokens=3) == [5, 5, 5]


def test_the_end_of_the_text_does_not_match_itself() -> None:
    assert draft([4, 5, 6], longest=3) == []


@pytest.mark.parametrize(
    ("budget", "length"),
    [
        (WIDE, 4),
        (Budget(nodes=3, depth=100, tokens=100), 3),
        (Budget(nodes=100, depth=2, tokens=100), 2),
        (Budget(nodes=100, depth=100, tokens=2), 1),
        (Budget(nodes=100, depth=100, tokens=1), 0),
        (Budget(nodes=0, depth=0, tokens=5), 0),
    ],
)
def test_a_draft_is_as_long_as_the_budget_lets_it_be(budget: Budget, length: int) -> None:
    assert draft([1, 2, 3, 4, 5, 1], budget=budget) == [2, 3, 4, 5][:length]


def test_tokens_are_entered_also_where_no_draft_was_possible() -> None:
    proposer = PromptLookup().new_proposer(SamplingParams())
    proposer.propose([1, 2, 3], Budget(nodes=0, depth=0, tokens=1))
    assert proposer.propose([1, 2, 3, 1], WIDE).tree.tokens[:2] == (2, 3)


def test_every_sequence_has_a_proposer_of_its_own() -> None:
    strategy = PromptLookup()
    assert strategy.max_nodes == strategy.config.num_tokens == 10
    one, other = strategy.new_proposer(SamplingParams()), strategy.new_proposer(SamplingParams())
    assert isinstance(one, Proposer)
    one.propose([1, 2, 3], WIDE)
    assert other.propose([1], WIDE).tree == TokenTree()


@pytest.mark.parametrize(
    ("settings", "message", "key"),
    [
        ({"num_tokens": 0}, "num_tokens must be 1 or more, not 0", "strategy.num_tokens"),
        (
            {"min_ngram_size": 0},
            "min_ngram_size must be 1 or more, not 0",
            "strategy.min_ngram_size",
        ),
        (
            {"max_ngram_size": 2, "min_ngram_size": 3},
            "max_ngram_size (2) must not be below min_ngram_size (3)",
            "strategy.max_ngram_size",
        ),
    ],
)
def test_settings_out_of_range_are_refused(
    settings: dict[str, int], message: str, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptLookupConfig(**settings)
    assert str(caught.value) == message
    assert caught.value.key == key
    assert caught.value.value == settings[key.removeprefix("strategy.")]
