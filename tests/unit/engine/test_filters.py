"""The filters of a draw: against those of ``transformers``, and against their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decodekit.engine.filters import excludes_top, warp
from decodekit.engine.sampling import PositionSampler, make_sampler
from decodekit.errors import ConfigError
from decodekit.interfaces.sampling_params import SamplingParams

INF = math.inf


def distribution(logits: Tensor, position: int = 0, **options: Any) -> Tensor:
    """Return the distributions [R, V] that are drawn from."""
    params = SamplingParams(**{"temperature": 1.0, **options})
    probs = warp(logits, params, [position] * len(logits))
    return probs / probs.sum(dim=-1, keepdim=True)


WARPERS: dict[str, Callable[[float], Any]] = {
    "top_k": lambda value: TopKLogitsWarper(int(value)),
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}
"""In the order in which ``generate`` applies them."""


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 0.2},
        {"typical_p": 0.95},
        {"epsilon_cutoff": 0.02},
        {"epsilon_cutoff": 0.9},
        {"eta_cutoff": 0.3},
        {"eta_cutoff": 0.002},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.7},
        {"typical_p": 0.9, "epsilon_cutoff": 0.03, "eta_cutoff": 0.2},
        {"top_k": 30, "top_p": 0.97, "min_p": 0.01, "epsilon_cutoff": 0.01, "eta_cutoff": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_draw_has_the_distribution_that_generate_draws_from(
    options: dict[str, Any], temperature: float
) -> None:
    """On rows that are peaked, flat, and with tokens that are banned."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 200, generator=generator) * torch.linspace(0.3, 6, 60)[:, None]
    logits[::3, 5:50] = -INF
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(temperature)]
        + [make(options[name]) for name, make in WARPERS.items() if name in options]
    )
    expected = warpers(torch.zeros(60, 1, dtype=torch.int64), logits).softmax(dim=-1)
    actual = distribution(logits, temperature=temperature, **options)
    # Where a mass is hit to the last bit one may decide otherwise than the other.
    same = ((actual > 0) == (expected > 0)).all(dim=-1)
    assert int((~same).sum()) <= 1
    torch.testing.assert_close(actual[same], expected[same], rtol=1e-4, atol=1e-6)
    assert int((expected > 0).sum(dim=-1).min()) < 150, "something is filtered"


def test_top_n_sigma_keeps_what_is_near_the_best_in_standard_deviations() -> None:
    row = [4.0, 3.0, 1.0, 0.0, -INF, -3.0]
    allowed = [value for value in row if value > -INF]
    mean = sum(allowed) / 5
    sigma = math.sqrt(sum((value - mean) ** 2 for value in allowed) / 5)
    for n in (0.1, 0.5, 1.0, 1.5, 2.5, 9.0):
        for temperature in (0.5, 3.0):
            kept = distribution(torch.tensor([row]), temperature=temperature, top_n_sigma=n)[0] > 0
            assert kept.tolist() == [4.0 - value <= n * sigma for value in row]


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        (0.05, [0.0, 0.0, 0.0, 1.0]),  # all are top choices: the least probable stays
        (0.15, [0.0, 0.0, 2 / 3, 1 / 3]),
        (0.25, [0.0, 0.5, 1 / 3, 1 / 6]),
        (0.35, [0.4, 0.3, 0.2, 0.1]),  # one alone is never left out
        (0.9, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_top_choices_are_left_out_but_for_the_least_probable_of_them(
    threshold: float, kept: list[float]
) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    options = {"xtc_probability": 1.0, "xtc_threshold": threshold}
    assert distribution(logits, **options)[0].tolist() == pytest.approx(kept)
    assert distribution(logits, xtc_probability=0.0)[0].tolist() == pytest.approx(
        [0.4, 0.3, 0.2, 0.1]
    )


def test_top_choices_are_those_among_what_the_other_filters_leave() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    left = distribution(logits, top_k=2, xtc_probability=1.0, xtc_threshold=0.42)[0]
    assert left.tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0])


def test_equal_top_choices_stay_together() -> None:
    logits = torch.tensor([[0.4, 0.25, 0.25, 0.1]]).log()
    left = distribution(logits, xtc_probability=1.0, xtc_threshold=0.2)[0]
    assert (left > 0).tolist() == [False, True, True, True]


def test_the_coin_of_the_top_choices_belongs_to_seed_and_position() -> None:
    params = [SamplingParams(seed=seed, xtc_probability=0.3) for seed in (1, 2)]
    first, second = ([excludes_top(one, place) for place in range(3000)] for one in params)
    assert first == [excludes_top(params[0], place) for place in range(3000)]
    assert first != second
    assert abs(sum(first) / 3000 - 0.3) < 6 * math.sqrt(0.3 * 0.7 / 3000)


def test_only_rows_whose_coin_says_so_lose_their_top_choices() -> None:
    params = SamplingParams(temperature=1.0, seed=4, xtc_probability=0.5, xtc_threshold=0.2)
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(40, -1)
    probs = make_sampler(params).probabilities(logits, range(40))
    assert (probs[:, 0] == 0).tolist() == [excludes_top(params, place) for place in range(40)]


@given(
    row=st.lists(st.integers(-6, 6).map(lambda n: n / 2) | st.just(-INF), min_size=1, max_size=12),
    options=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([1e-30, 0.3, 1.0, 9.0]),
            "top_p": st.sampled_from([0.2, 1.0]),
            "typical_p": st.sampled_from([1e-9, 0.2, 0.9, 1.0]),
            "epsilon_cutoff": st.sampled_from([0.0, 0.2, 0.99]),
            "eta_cutoff": st.sampled_from([0.0, 0.2, 0.99]),
            "top_n_sigma": st.sampled_from([0.0, 1e-9, 1.0]),
            "xtc_probability": st.sampled_from([0.0, 1.0]),
            "xtc_threshold": st.sampled_from([1e-9, 0.3, 1.0]),
        }
    ),
)
def test_no_combination_of_filters_leaves_nothing(row: list[float], options: Any) -> None:
    assume(max(row) > -INF)
    probs = distribution(torch.tensor([row]), **options)[0]
    assert torch.isfinite(probs).all()
    assert float(probs.sum()) == pytest.approx(1.0)
    assert all(value > -INF for value, p in zip(row, probs.tolist(), strict=True) if p > 0)


def test_filters_do_nothing_under_greedy_decoding() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0]])
    params = SamplingParams(typical_p=0.1, xtc_probability=1.0, top_n_sigma=0.1, eta_cutoff=0.9)
    assert make_sampler(params).choose(logits, [0]) == [1]
    assert not params.changes_logits


def test_a_row_is_filtered_alike_alone_and_among_others() -> None:
    logits = torch.randn(30, 70, generator=torch.Generator().manual_seed(2)) * 3
    options: dict[str, Any] = {
        "temperature": 1.2,
        "typical_p": 0.8,
        "eta_cutoff": 0.01,
        "top_n_sigma": 2.0,
        "xtc_probability": 0.5,
        "seed": 3,
    }
    sampler = PositionSampler(SamplingParams(**options))
    alone = [sampler.choose(row[None], [place])[0] for place, row in enumerate(logits)]
    assert sampler.choose(logits, range(30)) == alone


@pytest.mark.parametrize(
    "option",
    [
        {"typical_p": 0.0},
        {"typical_p": 1.1},
        {"epsilon_cutoff": 1.0},
        {"eta_cutoff": -0.1},
        {"top_n_sigma": -1.0},
        {"xtc_probability": 2.0},
        {"xtc_threshold": 0.0},
        {"dry_multiplier": -1.0},
        {"dry_base": 0.5},
        {"dry_allowed_length": 0},
        {"dry_range": -1},
        {"dry_sequence_breakers": "\n"},
        {"dry_sequence_breakers": [""]},
    ],
    ids=str,
)
def test_a_value_out_of_its_range_is_named(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        SamplingParams(**option)
