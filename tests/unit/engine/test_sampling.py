"""How the target model chooses: pinned draws, exact filters, independence of rows.

Chi-squared tests have fixed seeds and fail by chance for one seed in a million: their bounds are
the upper 1e-6 quantiles of the chi-squared distribution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from decodekit.engine.filters import warp
from decodekit.engine.sampling import GreedySampler, PositionSampler, make_sampler
from decodekit.errors import ConfigError, GenerationError
from decodekit.interfaces.sampling_params import SamplingParams

CHI2_1E6 = {2: 27.63, 4: 33.38, 6: 38.26, 15: 56.49, 63: 131.37}  # by degrees of freedom
INF = math.inf


def chi_squared(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    total = sum(counts)
    pairs = zip(counts, probabilities, strict=True)
    return sum((count - total * p) ** 2 / (total * p) for count, p in pairs)


# --- greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_takes_the_greatest_and_of_equals_the_first(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0, 3, 3, 1], [2, 2, 2, 2], [-INF, -INF, -9, -INF]], dtype=dtype)
    assert GreedySampler().choose(logits, [5, 6, 7]) == [1, 0, 2]


# --- warping -------------------------------------------------------------------------------------


def slow_warp(row: list[float], params: SamplingParams) -> list[float]:
    """Warp one row by a full sort in float64."""
    vocabulary = range(len(row))
    scores = [value / params.temperature for value in row]
    if params.top_k:
        least = sorted(scores, reverse=True)[min(params.top_k, len(scores)) - 1]
        scores = [score if score >= least else -INF for score in scores]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    probs = [weight / math.fsum(weights) for weight in weights]
    least = 0.0
    if params.top_p < 1:
        mass = 0.0
        for token in sorted(vocabulary, key=lambda token: -probs[token]):
            if mass >= params.top_p:
                break
            mass += probs[token]
            least = probs[token]
    least = max(least, params.min_p * max(probs))
    # Tokens that are equally probable stay or go together.
    return [p if p >= least * (1 - 1e-6) else 0.0 for p in probs]


def on_the_edge(row: list[float], params: SamplingParams) -> bool:
    """Return whether float32 may decide otherwise than float64: a border is hit nearly exactly."""
    probs = slow_warp(row, SamplingParams(temperature=params.temperature, top_k=params.top_k))
    ranked = sorted(probs, reverse=True)
    masses = [math.fsum(ranked[:end]) for end in range(1, len(ranked) + 1)]
    near_p = params.top_p < 1 and any(abs(mass - params.top_p) < 1e-5 for mass in masses)
    near_m = any(0 < abs(p - params.min_p * ranked[0]) < 1e-6 for p in probs)
    return near_p or near_m


@given(
    # Few levels: many tokens are equally probable.
    row=st.lists(st.integers(-6, 6).map(lambda n: n / 2) | st.just(-INF), min_size=2, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.97, 0.7, 0.31, 0.01]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
def test_warping_equals_a_full_sort_in_float64(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assume(max(row) > -INF)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not on_the_edge(row, params))
    expected = slow_warp(row, params)
    actual = warp(torch.tensor([row]), params, [0])
    assert actual.dtype == torch.float32
    assert [p > 0 for p in actual[0].tolist()] == [p > 0 for p in expected]
    assert actual[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        # Probabilities 1/2, 1/4, 1/8, 1/16, 1/16: exact in float32, so borders can be hit.
        ({}, 5),
        ({"top_k": 1}, 1),
        ({"top_k": 2}, 2),
        ({"top_k": 4}, 5),  # the fourth and the fifth are equal
        ({"top_k": 5}, 5),
        ({"top_k": 99}, 5),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.75}, 2),
        ({"top_p": 0.9}, 5),  # four would be enough, but the fifth equals the fourth
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.5}, 2),
        ({"min_p": 0.51}, 1),
        ({"min_p": 0.125}, 5),
        ({"min_p": 1.0}, 1),
        ({"top_k": 2, "top_p": 0.6}, 1),  # 2/3 of what top-k leaves
        ({"top_k": 2, "top_p": 0.7}, 2),
        ({"top_p": 0.8, "min_p": 0.3}, 2),  # the stricter of the two
        ({"top_p": 0.6, "min_p": 0.1}, 2),
    ],
)
def test_how_many_tokens_each_filter_keeps(options: dict[str, float], kept: int) -> None:
    logits = torch.tensor([[1 / 16, 1 / 4, 1 / 2, 1 / 16, 1 / 8]]).log()
    probs = warp(logits, SamplingParams(temperature=1.0, **options), [0])[0]  # type: ignore[arg-type]
    order = [2, 1, 4, 0, 3]
    assert [p > 0 for p in probs[order].tolist()] == [rank < kept for rank in range(5)]


def test_top_p_looks_at_as_many_tokens_as_it_takes() -> None:
    """A flat distribution over a vocabulary far larger than the first look at the top."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 9000, generator=generator, dtype=torch.float64) * 0.3
    logits[1] *= 20  # and a peaked one in the same batch
    for top_p in (0.05, 0.5, 0.99):
        actual = warp(logits, SamplingParams(temperature=1.0, top_p=top_p), range(3)) > 0
        probs = logits.float().softmax(dim=-1).double()
        ranked = probs.sort(dim=-1, descending=True)
        before = ranked.values.cumsum(dim=-1) - ranked.values
        expected = torch.zeros_like(actual).scatter(-1, ranked.indices, before < top_p)
        # Sums of thousands of float32 values: let one token at the border be kept or not.
        assert int((actual != expected).sum(dim=-1).max()) <= 1
        assert int(expected[0].sum()) > 256 or top_p == 0.05


# --- drawing -------------------------------------------------------------------------------------

LOGITS = torch.tensor([0.1, -2.0, 1.5, 0.1, -INF, 2.0, -0.7, 0.9])


@pytest.mark.parametrize(
    ("options", "degrees"),
    [
        ({"temperature": 0.8}, 6),
        ({"temperature": 1.7, "top_k": 4}, 4),  # two are equal at the border: five are kept
        ({"temperature": 1.0, "top_p": 0.8}, 2),
        ({"temperature": 1.0, "min_p": 0.1}, 4),
    ],
    ids=str,
)
def test_frequencies_are_the_warped_probabilities(options: dict[str, float], degrees: int) -> None:
    params = SamplingParams(seed=3, **options)  # type: ignore[arg-type]
    probs = slow_warp(LOGITS.tolist(), params)
    probs = [p / math.fsum(probs) for p in probs]
    drawn = PositionSampler(params).choose(LOGITS.expand(8000, -1), range(8000))
    assert {token for token, p in enumerate(probs) if p == 0}.isdisjoint(drawn)
    kept = [token for token, p in enumerate(probs) if p > 0]
    assert len(kept) == degrees + 1
    statistic = chi_squared([drawn.count(t) for t in kept], [probs[t] for t in kept])
    assert statistic < CHI2_1E6[degrees]


@given(st.integers(0, 2**64 - 1), st.integers(1, 8), st.data())
def test_a_row_is_chosen_alike_alone_and_among_others(
    seed: int, rows: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(seed % 1000)
    logits = torch.randn(rows, 30, generator=generator)
    sampler = PositionSampler(SamplingParams(temperature=0.9, top_p=0.9, top_k=20, seed=seed))
    together = sampler.choose(logits, positions)
    alone = [
        token
        for row, position in zip(logits, positions, strict=True)
        for token in sampler.choose(row[None], [position])
    ]
    assert together == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_rows_at_equal_positions_give_equal_tokens(dtype: torch.dtype) -> None:
    sampler = PositionSampler(SamplingParams(temperature=1.0, seed=5))
    tokens = sampler.choose(LOGITS.to(dtype).expand(60, -1), [9] * 60)
    assert len(set(tokens)) == 1
    assert len(set(sampler.choose(LOGITS.to(dtype).expand(60, -1), range(60)))) > 3


class Given:
    """Noise that is what a test says, the same at every position."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers = numbers

    def rows(self, positions: Sequence[int], *, like: Tensor) -> Tensor:
        return torch.tensor([self.numbers] * len(positions), dtype=like.dtype)


def sampler_with(numbers: Sequence[float], **options: Any) -> PositionSampler:
    sampler = PositionSampler(SamplingParams(**{"temperature": 1.0, **options}))
    sampler._noise = Given(numbers)  # type: ignore[assignment]
    return sampler


SMALLEST, LARGEST = 2.0**-53, 53 * math.log(2)  # what an exponential number can be, just about


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_draw_gives_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    """Not even when the impossible ones have all the luck, and the possible ones none."""
    row = torch.tensor([[-INF, 1.0, -INF, -80.0, -INF]], dtype=dtype)
    unlucky = [SMALLEST, LARGEST, SMALLEST, LARGEST, SMALLEST]
    for numbers in (unlucky, [SMALLEST] * 5, [LARGEST] * 5):
        assert sampler_with(numbers).choose(row, [0])[0] in (1, 3)
    tail = torch.arange(1000, dtype=dtype)[None] / 100  # the filters leave only a few at the end
    for options in ({"top_k": 3}, {"top_p": 0.02}, {"min_p": 0.98}):
        possible = warp(tail, SamplingParams(temperature=1.0, **options), [0])[0] > 0
        numbers = torch.where(possible, LARGEST, SMALLEST).tolist()
        (token,) = sampler_with(numbers, **options).choose(tail, [0])
        assert possible[token]


def test_the_largest_ratio_of_probability_to_number_wins() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.0, 0.25]]).log()
    for numbers, token in (
        ([1.0, 1.0, 1.0, 1.0], 1),
        ([0.499, 1.0, 1e-9, 0.6], 0),
        ([0.501, 1.0, 1e-9, 0.6], 1),
        ([0.5, 1.01, 1e-9, 0.4], 3),
        ([0.5, 1.0, 1e-9, 0.5], 0),  # of equals the first
    ):
        sampler = sampler_with(numbers)
        assert sampler.choose(logits, [0]) == [token]
        assert int(sampler.scores(logits, [0]).max(dim=-1).indices) == token


def test_noise_in_the_logits_of_other_tokens_does_not_matter() -> None:
    """Why it is a race and no cumulative sum: there, every logit's noise moves every border."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 3000, generator=generator, dtype=torch.float64) * 2
    sampler = PositionSampler(SamplingParams(temperature=1.5, seed=1))
    scores = sampler.scores(logits, range(200)).log()
    best = scores.topk(2, dim=-1)
    noisy = logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64) * 1e-4
    again = torch.tensor(sampler.choose(noisy, range(200)))
    clear = best.values[:, 0] - best.values[:, 1] > 1e-3
    assert int(clear.sum()) > 180
    assert torch.equal(again[clear], best.indices[clear, 0])


def test_rows_need_not_lie_in_a_row_in_memory() -> None:
    logits = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)):
        sampler = make_sampler(params)
        assert sampler.choose(logits.T, range(5)) == sampler.choose(logits.T.clone(), range(5))


def test_the_global_generators_are_not_touched() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    PositionSampler(SamplingParams(temperature=1.0)).choose(LOGITS.expand(9, -1), range(9))
    GreedySampler().choose(LOGITS[None], [0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_the_global_generators_are_not_used() -> None:
    sampler = PositionSampler(SamplingParams(temperature=1.0, seed=8))
    tokens = sampler.choose(LOGITS.expand(20, -1), range(20))
    torch.manual_seed(123)
    np.random.seed(123)
    random.seed(123)
    assert sampler.choose(LOGITS.expand(20, -1), range(20)) == tokens


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [[0.0, math.nan, 1.0], [0.0, INF, 1.0], [math.nan] * 3, [-INF] * 3],
    ids=["one NaN", "infinity", "all NaN", "nothing possible"],
)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7)], ids=str)
def test_broken_logits_are_an_error_and_never_a_token(
    params: SamplingParams, row: list[float]
) -> None:
    logits: Tensor = torch.tensor([[0.0, 1.0, 2.0], row])
    with pytest.raises(GenerationError, match="the model returned NaN or infinite logits"):
        make_sampler(params).choose(logits, [0, 1])


def test_a_tiny_temperature_is_greedy_and_no_fault_of_the_model() -> None:
    sampler = PositionSampler(SamplingParams(temperature=1e-39))
    assert sampler.choose(LOGITS[None], [0]) == [5]


def test_temperature_zero_is_greedy_whatever_else_is_set() -> None:
    assert isinstance(make_sampler(SamplingParams(top_k=3, top_p=0.5)), GreedySampler)
    assert isinstance(make_sampler(SamplingParams(temperature=0.1)), PositionSampler)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, not -0.1"),
        ({"temperature": INF}, "temperature must be 0 or more, not inf"),
        ({"temperature": math.nan}, "temperature must be 0 or more, not nan"),
        ({"top_k": -1}, "top_k must be 0 (off) or more, not -1"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], not 0.0"),
        ({"top_p": 1.01}, "top_p must be in (0, 1], not 1.01"),
        ({"min_p": -0.1}, "min_p must be in [0, 1], not -0.1"),
        ({"min_p": 1.1}, "min_p must be in [0, 1], not 1.1"),
        ({"seed": -1}, "seed must be in [0, 2**64), not -1"),
        ({"seed": 2**64}, "seed must be in [0, 2**64), not 18446744073709551616"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused(option: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**option)  # type: ignore[arg-type]
    assert str(caught.value) == message
    (name,) = option
    assert caught.value.key == name
    assert caught.value.value is option[name]


@pytest.mark.parametrize("size", [1, 5, 255, 256, 511, 512, 513, 1000, 4096, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_of_equal_logits_the_first_is_taken_at_every_place(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = torch.randint(0, 4, (7, size), generator=generator).to(dtype)
    rows[0] = 0
    rows[1, -1] = 9  # in the last block, shorter than the others
    rows[2] = -math.inf
    rows[2, size // 2] = -3
    expected = [row.index(max(row)) for row in rows.tolist()]
    assert GreedySampler().choose(rows, range(7)) == expected
    for broken in (math.nan, math.inf):
        for place in {0, size // 2, size - 1}:
            bad = rows.clone()
            bad[3, place] = broken
            with pytest.raises(GenerationError):
                GreedySampler().choose(bad, range(7))
