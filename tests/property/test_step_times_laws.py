"""Interpolation of step times: exact where it was measured, and never outside its neighbours."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.cli.profile import StepTimes
from decodekit.cli.profile.step_times import StepTime

seconds = st.floats(1e-5, 10.0)
axis = st.lists(st.integers(1, 200), min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[int], list[int], dict[tuple[int, int], float]]:
    contexts, rows = draw(axis), draw(axis)
    times = {(context, row): draw(seconds) for context in contexts for row in rows}
    return contexts, rows, times


def curve(times: dict[tuple[int, int], float]) -> StepTimes:
    points = [StepTime(context=c, rows=r, seconds=value) for (c, r), value in times.items()]
    return StepTimes(tuple(reversed(points)))


@given(grids())
def test_a_point_that_was_measured_is_that_time(grid) -> None:  # type: ignore[no-untyped-def]
    _, _, times = grid
    for (context, rows), value in times.items():
        assert curve(times).seconds(rows, context) == pytest.approx(value, rel=1e-12)


@given(grids(), st.data())
def test_a_point_between_is_between_its_neighbours(grid, data) -> None:  # type: ignore[no-untyped-def]
    contexts, rows, times = grid
    at = data.draw(st.floats(rows[0], rows[-1]))
    context = data.draw(st.floats(0, 250))

    def around(known: list[int], value: float) -> list[int]:
        above = bisect_right(known, value)
        return known[max(above - 1, 0) : above + 1]

    corners = [times[c, r] for c in around(contexts, context) for r in around(rows, at)]
    found = curve(times).seconds(at, context)
    assert min(corners) * (1 - 1e-9) <= found <= max(corners) * (1 + 1e-9)


@given(axis, st.floats(0.001, 1), st.floats(0.001, 1), st.floats(0, 1))
def test_a_straight_line_stays_one(rows: list[int], start: float, slope: float, at: float) -> None:
    times = StepTimes.of({row: start + slope * row for row in rows})
    place = rows[0] + at * (rows[-1] - rows[0])
    assert times.seconds(place) == pytest.approx(start + slope * place)


@given(grids())
def test_what_grows_with_the_rows_grows_between_them(grid) -> None:  # type: ignore[no-untyped-def]
    contexts, rows, times = grid
    for context in contexts:
        for row, value in zip(rows, sorted(times[context, row] for row in rows), strict=True):
            times[context, row] = value
    found = curve(times)
    middle = (contexts[0] + contexts[-1]) / 2
    values = [found.seconds(row, middle) for row in range(rows[0], rows[-1] + 1)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(values))
