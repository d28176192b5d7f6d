"""Stored curves: read back as they were written, and whatever is none is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decodekit.cli.profile import StepTimes
from decodekit.cli.profile.record import FORMAT, point_record, write_record
from decodekit.cli.profile.step_times import StepTime
from decodekit.errors import ConfigError


def record(points: list[dict[str, Any]]) -> dict[str, Any]:
    return {"format": FORMAT, "version": 1, "machine": {"threads": 2}, "points": points}


def stored(tmp_path: Path, curves: dict[int, dict[int, float]]) -> str:
    path = str(tmp_path / "curve.json")
    points = [
        point_record(context, rows, [seconds], base=[seconds], limit=None)
        for context, curve in curves.items()
        for rows, seconds in curve.items()
    ]
    write_record(path, record(points))
    return path


def test_a_stored_curve_is_read_and_interpolated(tmp_path: Path) -> None:
    path = stored(tmp_path, {100: {1: 0.01, 4: 0.016, 8: 0.02}, 300: {1: 0.03, 4: 0.03, 8: 0.04}})
    times = StepTimes.read(path)
    assert (times.contexts, times.most_rows) == ((100, 300), 8)
    assert times.facts["machine"] == {"threads": 2}
    assert times.seconds(4, 100) == 0.016
    assert times.seconds(2, 100) == pytest.approx(0.012)
    assert times.seconds(6, 100) == pytest.approx(0.018)
    assert times.seconds(2.5, 100) == pytest.approx(0.013)  # a mean of rows
    assert times.seconds(1, 200) == pytest.approx(0.02)
    assert times.seconds(8, 150) == pytest.approx(0.025)
    assert times.seconds(8, 5000) == 0.04  # the nearest context
    assert times.seconds(8, 1) == times.seconds(8) == 0.02


def test_a_curve_that_is_made_up() -> None:
    times = StepTimes.of({1: 1.0, 3: 2.0})
    assert times.seconds(2) == 1.5
    assert times.seconds(2, 10_000) == 1.5


@pytest.mark.parametrize("rows", [0, 0.5, 9, float("nan")])
def test_rows_that_were_not_measured_have_no_time(rows: float) -> None:
    with pytest.raises(ConfigError, match="steps of 1 to 8 rows were measured, not of"):
        StepTimes.of({1: 1.0, 8: 2.0}).seconds(rows)


def test_a_context_with_fewer_points_says_so() -> None:
    times = StepTimes(
        (
            StepTime(context=10, rows=1, seconds=1.0),
            StepTime(context=10, rows=4, seconds=2.0),
            StepTime(context=20, rows=2, seconds=1.0),
        )
    )
    assert times.most_rows == 2
    assert times.seconds(4, 10) == 2.0
    with pytest.raises(ConfigError, match="behind a context of 20 steps of 2 to 2 rows"):
        times.seconds(4, 15)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "at least one point"),
        ([(1, 1, 1.0), (1, 1, 2.0)], "one point for each context and rows"),
        ([(1, 0, 1.0)], "rows must be 1 or more"),
        ([(-1, 1, 1.0)], "context must be 0 or more"),
        ([(1, 1, 0.0)], "cannot take 0.0 seconds"),
        ([(1, 1, float("nan"))], "cannot take nan seconds"),
    ],
)
def test_points_that_are_no_curve(points: list[tuple[int, int, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepTimes(tuple(StepTime(context=c, rows=r, seconds=s) for c, r, s in points))


POINT = point_record(5, 1, [1.0], base=[1.0], limit=None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "is no JSON file"),
        (b"{", "is no JSON file"),
        (b"[1]", "holds no step times; it must be a profile.output of job=profile"),
        (b'{"header": {}}', "holds no step times"),
        ({**record([POINT]), "version": 2}, "has version 2 of the format and this decodekit reads"),
        (record([]), "is damaged"),
        (record([{**POINT, "rows": "1"}]), "is damaged"),
        (record([{**POINT, "median": -1.0}]), "is damaged"),
        (record([{**POINT, "quartiles": [1.0]}]), "is damaged"),
        (record([{"rows": 1}]), "is damaged"),
        ({**record([]), "points": 3}, "is damaged"),
    ],
    ids=[f"content{number}" for number in range(11)],
)
def test_a_file_that_holds_no_curve(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ConfigError, match=message):
        StepTimes.read(str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (str(tmp_path / "none.json"), str(tmp_path)):
        with pytest.raises(ConfigError, match="cannot read the step times in"):
            StepTimes.read(path)
    with pytest.raises(ConfigError, match="is no JSON file"):
        StepTimes.read("a\0b")
