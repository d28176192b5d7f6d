"""Ratios, intervals and differences of a benchmark, on measurements that are made up."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.cli.bench.measurement import Measurement, Run, measure
from decodekit.cli.bench.summary import Difference, Summary, reference_of, summarize
from decodekit.cli.bootstrap import bootstrap_interval


def measured(
    contender: str,
    prompt: str,
    seconds: float,
    tokens: tuple[int, ...] = (1, 2, 3, 4),
    *,
    repeat: int = 0,
) -> Measurement:
    run = Run(
        tokens=list(tokens), steps=2, rows_per_step=3.0, seconds=seconds, time_to_first_token=None
    )
    return Measurement(
        prompt=prompt, category="c", contender=contender, repeat=repeat, equal=True, run=run
    )


def table(times: dict[str, list[float]]) -> list[Measurement]:
    return [
        measured(name, f"p{number}", value)
        for name, values in times.items()
        for number, value in enumerate(values)
    ]


def by_name(measurements: list[Measurement], reference: str) -> dict[str, Summary]:
    return {one.contender: one for one in summarize(measurements, reference=reference)}


def test_a_ratio_is_the_geometric_mean_over_prompts() -> None:
    found = by_name(table({"plain": [1.0, 2.0, 8.0], "look": [0.5, 2.0, 2.0]}), "plain")
    assert found["plain"].ratio == 1.0
    assert found["look"].ratio == pytest.approx((2 * 1 * 4) ** (1 / 3))
    assert found["look"].tokens_per_second == pytest.approx(2.0)  # the median of 8, 2 and 2
    assert found["look"].tokens_per_step == 2.0
    assert found["look"].rows_per_step == 3.0
    assert found["look"].prompts == 3


def test_the_interval_is_over_prompts_whatever_the_repeats() -> None:
    ratios = [2.0, 1.0, 4.0, 1.5, 3.0]
    once = [
        one
        for number, ratio in enumerate(ratios)
        for one in (measured("plain", f"p{number}", ratio), measured("look", f"p{number}", 1.0))
    ]
    thrice = [
        measured(one.contender, one.prompt, one.run.seconds, repeat=repeat)
        for repeat in range(3)
        for one in once
    ]
    expected = bootstrap_interval(
        5, lambda places: math.exp(fmean(math.log(ratios[place]) for place in places))
    )
    assert expected is not None
    for measurements in (once, thrice):
        found = by_name(measurements, "plain")
        assert found["look"].interval == pytest.approx(expected)
        assert found["plain"].interval == (1.0, 1.0)
    # To the digit: the ends for these five ratios.
    assert expected == (pytest.approx(1.350960), pytest.approx(3.103691))


def test_a_prompt_counts_by_its_median_repeat_and_by_its_tokens() -> None:
    found = by_name(
        [
            measured("plain", "p", 4.0, repeat=0),
            measured("plain", "p", 400.0, repeat=1),  # the machine was busy
            measured("plain", "p", 4.4, repeat=2),
            # Half the tokens in a quarter of the time.
            *(measured("look", "p", 1.1, (1, 2), repeat=repeat) for repeat in range(3)),
        ],
        "plain",
    )
    assert found["look"].ratio == pytest.approx(2.0)
    assert found["look"].interval is None  # one prompt


times = st.lists(st.floats(0.001, 1000), min_size=3, max_size=3)


@given(times, times, times)
def test_ratios_do_not_depend_on_the_reference(
    first: list[float], second: list[float], third: list[float]
) -> None:
    measurements = table({"a": first, "b": second, "c": third})
    to_a, to_b = by_name(measurements, "a"), by_name(measurements, "b")
    ratio = {name: one.ratio or 0.0 for name, one in to_a.items()}
    back = to_b["a"].ratio or 0.0
    assert ratio["b"] * back == pytest.approx(1.0)
    assert (to_b["c"].ratio or 0.0) * ratio["b"] == pytest.approx(ratio["c"])
    interval, inverse = to_a["b"].interval, to_b["a"].interval
    assert interval is not None
    assert inverse is not None
    assert inverse == pytest.approx((1 / interval.high, 1 / interval.low))
    assert interval.low <= ratio["b"] * (1 + 1e-9)
    assert ratio["b"] <= interval.high * (1 + 1e-9)


def test_where_tokens_differ_first() -> None:
    found = by_name(
        [
            measured("plain", "p1", 1.0, (5, 6, 7)),
            measured("plain", "p2", 1.0, (5, 6, 7)),
            measured("plain", "p2", 1.0, (5, 6, 7), repeat=1),
            measured("plain", "p2", 1.0, (5, 6, 7), repeat=2),
            measured("plain", "p3", 1.0, (5, 6, 7)),
            measured("look", "p1", 1.0, (5, 6, 7)),
            measured("look", "p2", 1.0, (5, 6, 8)),
            measured("look", "p2", 1.0, (5, 9, 8), repeat=1),
            measured("look", "p2", 1.0, (5, 6, 8), repeat=2),
            measured("look", "p3", 1.0, (5, 6)),
        ],
        "plain",
    )
    assert found["plain"].differences == ()
    assert found["look"].differences == (
        Difference(prompt="p2", token=1),
        Difference(prompt="p3", token=2),
    )


def test_the_reference_is_the_first_or_one_by_name() -> None:
    measurements = table({"a": [1.0], "b": [1.0]})
    assert reference_of(measurements) == "a"
    assert reference_of(measurements, "b") == "b"
    with pytest.raises(KeyError) as caught:
        reference_of(measurements, "c")
    assert caught.value.args == (["a", "b"],)


class Counting:
    """A contender that writes down when it was asked for what."""

    def __init__(self, name: str, calls: list[tuple[str, int]]) -> None:
        self.name = name
        self._calls = calls

    def run(self, prompt: list[int], max_new_tokens: int) -> Run:
        self._calls.append((self.name, max_new_tokens))
        tokens = [7, len(self.name)]
        return Run(tokens=tokens, steps=1, rows_per_step=1.0, seconds=1.0, time_to_first_token=None)


def test_every_contender_has_every_place_and_every_predecessor() -> None:
    calls: list[tuple[str, int]] = []
    contenders = [Counting(name, calls) for name in ("a", "b", "cc")]
    prompts = [(f"p{number}", "x", [number]) for number in range(6)]
    found = list(measure(contenders, prompts, reference="cc", max_new_tokens=20, repeats=1))
    assert calls[:3] == [("a", 8), ("b", 8), ("cc", 8)]  # the warm-up
    names = [name for name, _ in calls[3:]]
    rounds = [names[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(one) == ["a", "b", "cc"] for one in rounds)
    for place in range(3):
        column = [one[place] for one in rounds]
        assert [column.count(name) for name in ("a", "b", "cc")] == [2, 2, 2]
    after = {pair for one in rounds for pair in pairwise(one)}
    assert len(after) == 6
    equal = {one.contender: one.equal for one in found}
    assert equal == {"a": False, "b": False, "cc": True}
