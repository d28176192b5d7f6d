"""The bootstrap: figures that can be worked out by hand, and the same ones every time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import fmean

import pytest

from decodekit.cli.bootstrap import Interval, bootstrap_interval, quantile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([4.0], 0.3, 4.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.5),
        ([4.0, 1.0, 2.0, 3.0], 0.25, 1.75),
        ([1.0, 2.0], 0.0, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
        ([10.0, 20.0], 0.9, 19.0),
    ],
)
def test_quantiles(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == pytest.approx(expected)


def mean_of(values: Sequence[float]):  # type: ignore[no-untyped-def]
    return lambda places: fmean(values[place] for place in places)


def test_two_things() -> None:
    """Of four equally probable resamples one has only the first and one only the second."""
    assert bootstrap_interval(2, mean_of([0.0, 1.0])) == Interval(0.0, 1.0)
    # A quarter of the resamples is 0 and a quarter 1, so half of them lie at 0.5.
    assert bootstrap_interval(2, mean_of([0.0, 1.0]), level=0.4) == Interval(0.5, 0.5)


def test_the_interval_of_all_resamples_is_approached() -> None:
    values = [1.0, 2.0, 4.0, 7.0, 11.0]
    every = [fmean(values[place] for place in places) for places in product(range(5), repeat=5)]
    found = bootstrap_interval(5, mean_of(values))
    assert found is not None
    assert found.low == pytest.approx(quantile(every, 0.025), abs=0.21)
    assert found.high == pytest.approx(quantile(every, 0.975), abs=0.21)
    # To the digit, on every version of Python and on every machine.
    assert found == (pytest.approx(2.0), pytest.approx(8.4))


def test_the_draws_are_its_own_and_always_the_same() -> None:
    values = [1.0, 2.0, 4.0, 7.0, 11.0, 13.0]
    first = bootstrap_interval(6, mean_of(values), resamples=50)
    assert bootstrap_interval(6, mean_of(values), resamples=50) == first
    assert bootstrap_interval(6, mean_of(values), resamples=50, seed=1) != first


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_follows_from_less_than_two(count: int) -> None:
    assert bootstrap_interval(count, mean_of([1.0])) is None


def test_a_thing_that_never_differs_has_no_width() -> None:
    assert bootstrap_interval(7, mean_of([3.0] * 7)) == (3.0, 3.0)
