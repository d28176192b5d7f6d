"""Numbers of a place in a text: pinned, independent of each other, and of the right laws.

Chi-squared tests have fixed seeds and fail by chance for one seed in a million: their bounds are
the upper 1e-6 quantiles of the chi-squared distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodekit.engine import noise
from decodekit.engine.noise import DRAFT, TARGET, TEST, PositionNoise, exponentials, uniform

CHI2_1E6 = {15: 56.49, 63: 131.37}  # by degrees of freedom


def chi_squared(cells: Sequence[int], count: int) -> float:
    """Return the statistic of ``cells`` for equal shares of ``count`` cells."""
    share = len(cells) / count
    return sum((cells.count(cell) - share) ** 2 / share for cell in range(count))


def evenly(number: float) -> float:
    """Return a uniform number made from one of the exponential distribution."""
    return math.exp(-number)


def philox(key: int, counter: int) -> list[int]:
    """Return the words of Philox-4x64-10 (Salmon et al., 2011), written from the paper."""
    low = 2**64 - 1
    words = [counter >> shift & low for shift in (0, 64, 128, 192)]
    keys = [key, 0]
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (right >> 64) ^ words[1] ^ keys[0],
            right & low,
            (left >> 64) ^ words[3] ^ keys[1],
            left & low,
        ]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & low, (keys[1] + 0xBB67AE8584CAA73B) & low]
    return words


seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**40)


@given(seeds, positions, st.sampled_from([TARGET, DRAFT, TEST]), st.integers(0, 99))
def test_uniform_numbers_are_philox_with_the_seed_as_its_key(
    seed: int, position: int, purpose: int, draw: int
) -> None:
    # numpy counts up before it draws.
    counter = 1 + (position << 64) + (draw << 128) + (purpose << 192)
    expected = (philox(seed, counter)[0] >> 11) * 2.0**-53
    assert uniform(seed, position, purpose=purpose, draw=draw) == expected


@given(seeds, positions, st.sampled_from([TARGET, DRAFT]))
def test_exponential_numbers_are_the_logarithms_of_philox(
    seed: int, position: int, purpose: int
) -> None:
    numbers = exponentials(seed, position, 10, purpose=purpose)
    counter = (position << 64) + (purpose << 192)
    words = [word for block in (1, 2, 3) for word in philox(seed, counter + block)][:10]
    expected = [-math.log(((word >> 12) + 0.5) * 2.0**-52) for word in words]
    assert numbers.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("seed", "position", "value"),
    [
        (0, 0, 0.6883992612415721),
        (0, 1, 0.24240020837835788),
        (42, 17, 0.49565590332057236),
        (2**64 - 1, 1_000_000, 0.26268986762573854),
    ],
)
def test_the_numbers_of_a_position_are_pinned(seed: int, position: int, value: float) -> None:
    """These never change: a seed is a promise that a text can be had again."""
    assert float(exponentials(seed, position, 5)[4]) == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize(
    "row",
    [
        lambda: [evenly(float(exponentials(7, place, 1))) for place in range(4096)],
        lambda: [evenly(float(exponentials(seed, 9, 3)[2])) for seed in range(4096)],
        lambda: list(map(evenly, exponentials(7, 3, 4096).tolist())),
        lambda: list(map(evenly, exponentials(7, 3, 4096, purpose=DRAFT).tolist())),
        lambda: [uniform(7, place) for place in range(4096)],
        lambda: [uniform(seed, 9) for seed in range(4096)],
        lambda: [uniform(7, 9, draw=draw) for draw in range(4096)],
        # One after the other: the same place for another purpose, the next place, the next draw.
        lambda: [
            number
            for place in range(2048)
            for number in (uniform(7, place), evenly(float(exponentials(7, place, 1))))
        ],
        lambda: [
            evenly(float(exponentials(7, place, 1, purpose=purpose)))
            for place in range(2048)
            for purpose in (TARGET, DRAFT)
        ],
        lambda: [uniform(7, place, draw=draw) for place in range(2048) for draw in (0, 1)],
    ],
)
def test_numbers_are_uniform_and_neighbours_are_independent(row: Callable[[], list[float]]) -> None:
    numbers = row()
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert chi_squared([int(number * 16) for number in numbers], 16) < CHI2_1E6[15]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    assert chi_squared([int(a * 8) * 8 + int(b * 8) for a, b in pairs], 64) < CHI2_1E6[63]


def test_the_rows_of_two_positions_share_no_number() -> None:
    """A counter that runs on into the next position's would shift a row by four tokens."""
    rows = [exponentials(1, position, 4000).tolist() for position in (0, 1, 2)]
    assert len({number for row in rows for number in row}) == 12000


def test_a_larger_vocabulary_has_the_same_numbers_and_more() -> None:
    assert torch.equal(exponentials(3, 4, 100), exponentials(3, 4, 131)[:100])


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_numbers_are_above_zero_and_finite(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Extreme:
        def random_raw(self, size: int) -> np.ndarray:
            return np.full(size, bits, dtype=np.uint64)

    monkeypatch.setattr(noise, "_generator", lambda *_: Extreme())
    for dtype in (torch.float64, torch.float32):
        (number,) = exponentials(0, 0, 1).to(dtype).tolist()
        assert 0 < number < 40


def test_rows_are_kept_while_they_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(seed: int, position: int, size: int, *, purpose: int) -> torch.Tensor:
        made.append(position)
        return exponentials(seed, position, size, purpose=purpose)

    monkeypatch.setattr(noise, "exponentials", counted)
    source = PositionNoise(5)
    like = torch.zeros(1, 6)
    first = source.rows([3, 5, 4, 5], like=like)
    assert made == [3, 5, 4]
    assert first.dtype == torch.float32
    expected = [exponentials(5, position, 6).float() for position in (3, 5, 4, 5)]
    assert torch.equal(first, torch.stack(expected))
    source.rows([4, 5, 6], like=like)
    assert made == [3, 5, 4, 6]  # 4 and 5 were still there
    assert torch.equal(source.rows([3], like=like)[0], first[0])  # forgotten, and made again
    assert made == [3, 5, 4, 6, 3]


def test_rows_follow_the_vocabulary_the_dtype_and_the_purpose() -> None:
    source = PositionNoise(5)
    assert source.rows([1], like=torch.zeros(1, 6)).shape == (1, 6)
    wider = source.rows([1], like=torch.zeros(1, 9))
    assert wider.shape == (1, 9)
    exact = PositionNoise(5).rows([1], like=torch.zeros(1, 9, dtype=torch.float64))
    assert torch.equal(exact[0], exponentials(5, 1, 9))
    later = source.rows([1], like=torch.zeros(1, 9, dtype=torch.float64))
    assert torch.equal(later, exact)
    other = PositionNoise(5, purpose=DRAFT).rows([1], like=torch.zeros(1, 9))
    assert not torch.equal(other, wider)
