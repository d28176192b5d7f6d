"""What it takes for another token: by hand, and against perturbations of the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit.cli.verify.margin import margin
from decodekit.engine.noise import exponentials
from decodekit.engine.sampling import GreedySampler, PositionSampler
from decodekit.interfaces.sampling_params import SamplingParams

PLACE = 9


def sampler_of(**options: Any) -> PositionSampler:
    return PositionSampler(SamplingParams(**{"temperature": 1.0, **options}))


def row_for(race: list[float], *, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Return logits with which the draw at ``PLACE`` is decided by ``race``: the largest wins."""
    noise = exponentials(seed, PLACE, len(race)).log() * temperature
    return torch.tensor(race, dtype=torch.float64) + noise


def test_under_argmax_it_is_the_difference_of_logits() -> None:
    assert margin(torch.tensor([0.5, 2.0, 1.75]), GreedySampler(), PLACE, 2) == 0.25


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_under_a_draw_it_is_the_difference_of_the_race(temperature: float) -> None:
    row = row_for([1.0, 0.5, 0.9, -3.0], temperature=temperature)
    sampler = sampler_of(temperature=temperature)
    assert sampler.choose(row[None], [PLACE]) == [0]
    found = [margin(row, sampler, PLACE, token) for token in range(4)]
    assert found == pytest.approx([0.0, 0.5, 0.1, 4.0])


def test_a_token_that_is_not_to_be_had_is_infinitely_far() -> None:
    row = torch.tensor([2.0, 1.0, -math.inf])
    assert margin(row, sampler_of(), PLACE, 2) == math.inf
    assert margin(row, GreedySampler(), PLACE, 2) == math.inf


def lucky(token: int, size: int) -> int:
    """Return a seed whose draw at ``PLACE`` prefers ``token`` by far."""
    for seed in range(5000):
        noise = exponentials(seed, PLACE, size).log()
        if float(noise.sort().values[1] - noise[token]) > 3:
            return seed
    raise AssertionError


def logits(*shares: float) -> list[float]:
    return [math.log(share) for share in shares]


@pytest.mark.parametrize(
    ("options", "row", "gap"),
    [
        # A filter dropped token 1, which the draw would have preferred.
        ({"top_k": 1}, [1.0, 0.995, -3.0], 0.005),
        ({"min_p": 0.5}, [0.0, math.log(0.4999), -9.0], math.log(0.5 / 0.4999)),
        ({"top_p": 0.6}, logits(0.601, 0.3, 0.099), 0.00416),
        # It may also overtake what is before it.
        ({"top_p": 0.5}, logits(0.401, 0.4, 0.199), 0.0),
        ({"top_p": 0.35}, logits(0.401, 0.4, 0.199), math.log(0.401 / 0.4)),
        ({"top_k": 2, "top_p": 0.6}, logits(0.3001, 0.2, 0.1999, 0.3), 0.41),
        # Top-p looks at what top-k leaves: 0.656 and 0.344.
        ({"top_k": 2, "top_p": 0.6}, logits(0.4, 0.21, 0.2, 0.19), 0.2389),
        # Nothing dropped it: the draw prefers it.
        ({"top_k": 2}, [1.0, 0.995, -3.0], 0.0),
        ({"min_p": 0.5}, [0.0, math.log(0.51), -9.0], 0.0),
    ],
)
def test_what_it_takes_for_a_filter_to_keep_a_token(
    options: dict[str, Any], row: list[float], gap: float
) -> None:
    sampler = sampler_of(**options, seed=lucky(1, len(row)))
    found = margin(torch.tensor(row, dtype=torch.float64), sampler, PLACE, 1)
    assert found == pytest.approx(gap, rel=0.02, abs=1e-9)
    assert (sampler.choose(torch.tensor([row], dtype=torch.float64), [PLACE]) == [1]) == (gap == 0)


@pytest.mark.parametrize(
    ("options", "row", "gap"),
    [
        # A filter kept token 1, which the draw prefers; without it token 0 comes out.
        ({"top_k": 2}, [1.0, 0.5, 0.493, -3.0], 0.007),
        ({"min_p": 0.5}, [0.0, math.log(0.501), -9.0], math.log(0.501 / 0.5)),
        ({"top_p": 0.6}, logits(0.599, 0.3, 0.101), 0.00416),
        # It may also fall behind what is after it.
        ({"top_p": 0.6}, logits(0.45, 0.2, 0.199, 0.151), math.log(0.2 / 0.199)),
    ],
)
def test_what_it_takes_for_a_filter_to_drop_the_winner(
    options: dict[str, Any], row: list[float], gap: float
) -> None:
    size = len(row)
    for seed in range(20000):  # token 1 wins by far, then token 0
        noise = exponentials(seed, PLACE, size).log()
        order = noise.sort()
        if order.indices[0] == 1 and order.indices[1] == 0 and order.values.diff()[:2].min() > 1.5:
            break
    else:
        raise AssertionError
    sampler = sampler_of(**options, seed=seed)
    tensor = torch.tensor(row, dtype=torch.float64)
    assert sampler.choose(tensor[None], [PLACE]) == [1]
    assert margin(tensor, sampler, PLACE, 0) == pytest.approx(gap, rel=0.02)


def seed_with(order: list[int], size: int) -> int:
    """Return a seed whose draw at ``PLACE`` prefers tokens in this order, each by far."""
    for seed in range(20000):
        noise = exponentials(seed, PLACE, size).log().sort()
        far = float(noise.values.diff()[: len(order) - 1].min()) > 1.5
        if far and noise.indices[: len(order)].tolist() == order:
            return seed
    raise AssertionError


def test_those_that_are_dropped_are_not_replaced_by_others_of_them() -> None:
    """Of tokens 1 and 2, both preferred to 0, top-k drops one or the other, never both."""
    row = torch.tensor([1.0, 0.5, 0.4999, -9.0], dtype=torch.float64)
    sampler = sampler_of(top_k=2, seed=seed_with([1, 2, 0], 4))
    assert sampler.choose(row[None], [PLACE]) == [1]
    assert margin(row, sampler, PLACE, 0) > 0.5
    shares = torch.tensor(logits(0.45, 0.2, 0.1999, 0.1501), dtype=torch.float64)
    sampler = sampler_of(top_p=0.6, seed=seed_with([1, 2, 0], 4))
    assert sampler.choose(shares[None], [PLACE]) == [1]
    assert margin(shares, sampler, PLACE, 0) > 0.25


def test_the_best_token_is_dropped_when_another_one_is_the_best() -> None:
    row = torch.tensor([0.0, -0.1, -9.0], dtype=torch.float64)
    sampler = sampler_of(min_p=0.95, seed=seed_with([0, 1], 3))
    # Token 1 has to be above -0.051, and token 0 as far below token 1.
    assert margin(row, sampler, PLACE, 1) == pytest.approx(0.1 - math.log(0.95))


@pytest.mark.parametrize("token", [-1, 4, 99])
def test_a_token_outside_the_vocabulary_is_infinitely_far(token: int) -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    assert margin(row, sampler_of(), PLACE, token) == math.inf
    assert margin(row, GreedySampler(), PLACE, token) == math.inf


def test_a_border_that_does_not_explain_the_token_is_no_tie() -> None:
    """The third token is at the border of top-k to the last bit, but it is the first that came."""
    row = torch.tensor([3.0, 2.0, 1.0, 1.0 - 1e-9], dtype=torch.float64)
    sampler = sampler_of(top_k=3, seed=lucky(1, 4))
    assert sampler.choose(row[None], [PLACE]) == [1]
    assert margin(row, sampler, PLACE, 0) > 1
    assert margin(row, sampler, PLACE, 3) > 1


@settings(max_examples=300)
@given(
    row=st.lists(st.integers(-24, 24).map(lambda n: n / 8), min_size=2, max_size=9),
    noise=st.lists(st.floats(-1, 1), min_size=9, max_size=9),
    options=st.sampled_from(
        [{}, {"top_k": 2}, {"top_k": 4}, {"top_p": 0.5}, {"top_p": 0.9}, {"min_p": 0.2}]
    ),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 50),
    data=st.data(),
)
def test_no_smaller_change_of_the_logits_leads_to_the_token(
    row: list[float],
    noise: list[float],
    options: dict[str, Any],
    temperature: float,
    seed: int,
    data: st.DataObject,
) -> None:
    """So that no rounding within the tolerance is ever called a defect."""
    exact = torch.tensor(row, dtype=torch.float64)
    sampler = sampler_of(**options, temperature=temperature, seed=seed)
    other = data.draw(st.integers(0, len(row) - 1))
    gap = margin(exact, sampler, PLACE, other)
    assume(0 < gap < math.inf)
    assert sampler.choose(exact[None], [PLACE]) != [other]
    moved = torch.tensor(noise[: len(row)], dtype=torch.float64) * gap * 0.499
    assert sampler.choose((exact + moved)[None], [PLACE]) != [other]
    # Not even by the move that helps the token most: it up, all others down.
    moved = torch.full_like(exact, -0.499 * gap)
    moved[other] = 0.499 * gap
    assert sampler.choose((exact + moved)[None], [PLACE]) != [other]


LOOSE: list[dict[str, Any]] = [
    {"typical_p": 0.3},
    {"typical_p": 0.9},
    {"epsilon_cutoff": 0.1},
    {"eta_cutoff": 0.2},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.5, "top_k": 3},
    {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    {"xtc_probability": 0.5, "xtc_threshold": 0.3, "top_p": 0.9},
    {"top_p": 0.7, "typical_p": 0.6},
    {"min_p": 0.2, "typical_p": 0.5, "xtc_probability": 0.5},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.7, "epsilon_cutoff": 0.02}
    | {"eta_cutoff": 0.1, "top_n_sigma": 1.5, "xtc_probability": 1.0, "xtc_threshold": 0.2},
]
"""Filters whose borders depend on all logits at once, alone and with others."""


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.integers(-24, 24).map(lambda n: n / 8), min_size=2, max_size=9),
    noise=st.lists(st.floats(-1, 1), min_size=9, max_size=9),
    options=st.sampled_from(LOOSE),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 50),
    data=st.data(),
)
def test_no_smaller_change_leads_to_the_token_where_borders_move_with_all_logits(
    row: list[float],
    noise: list[float],
    options: dict[str, Any],
    temperature: float,
    seed: int,
    data: st.DataObject,
) -> None:
    exact = torch.tensor(row, dtype=torch.float64)
    sampler = sampler_of(**options, temperature=temperature, seed=seed)
    other = data.draw(st.integers(0, len(row) - 1))
    gap = margin(exact, sampler, PLACE, other)
    assume(gap > 0)
    gap = min(gap, 50.0)
    moves = [torch.tensor(noise[: len(row)], dtype=torch.float64)]
    moves += [moves[0].sign(), torch.full_like(exact, -1.0)]
    moves[2][other] = 1.0
    for moved in moves:
        assert sampler.choose((exact + moved * gap * 0.499)[None], [PLACE]) != [other]


@pytest.mark.parametrize("options", LOOSE, ids=str)
def test_another_token_is_nearly_always_far(options: dict[str, Any]) -> None:
    """A bound that calls everything a tie would be safe as well."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 30, generator=generator, dtype=torch.float64) * 2
    gaps = []
    for seed, row in enumerate(rows):
        sampler = sampler_of(**options, seed=seed)
        (chosen,) = sampler.choose(row[None], [PLACE])
        assert margin(row, sampler, PLACE, chosen) == 0
        others = set(row.topk(3).indices.tolist()) - {chosen}
        gaps += [margin(row, sampler, PLACE, other) for other in others]
    assert sum(gap > 1e-2 for gap in gaps) > 0.9 * len(gaps) > 30


@pytest.mark.parametrize("options", [{"typical_p": 0.9999999}, {"top_n_sigma": 1e6}], ids=str)
def test_a_border_that_is_far_off_leaves_the_difference_of_the_race(
    options: dict[str, Any],
) -> None:
    row = row_for([1.0, 0.5, 0.9, -3.0])
    found = [margin(row, sampler_of(**options), PLACE, token) for token in range(3)]
    assert found == pytest.approx([0.0, 0.5, 0.1], rel=2e-3)


@given(
    row=st.lists(st.integers(-24, 24).map(lambda n: n / 8), min_size=2, max_size=9),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 50),
    data=st.data(),
)
def test_a_larger_change_does_without_filters(
    row: list[float], temperature: float, seed: int, data: st.DataObject
) -> None:
    exact = torch.tensor(row, dtype=torch.float64)
    sampler = sampler_of(temperature=temperature, seed=seed)
    other = data.draw(st.integers(0, len(row) - 1))
    gap = margin(exact, sampler, PLACE, other)
    moved = torch.full_like(exact, -0.501 * gap)
    moved[other] = 0.501 * gap
    assert sampler.choose((exact + moved)[None], [PLACE]) == [other]
