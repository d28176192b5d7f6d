"""Timing steps and reporting their times, over a model without weights."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any

import pytest

from decodekit.cli.profile.chart import draw
from decodekit.cli.profile.measure import StepTimer, tree_of
from decodekit.cli.profile.record import FORMAT, point_record
from decodekit.cli.profile.report import render
from decodekit.errors import ConfigError
from decodekit.interfaces.plan import StepPlan
from tests.support.fakes import ToyAdapter


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 9, 64])
@pytest.mark.parametrize("shape", ["window", "chain"])
def test_the_tree_of_a_step(rows: int, shape: str) -> None:
    tree = tree_of(rows, shape, range(100))
    assert StepPlan(5, (1,), tree).rows == rows
    width = rows if shape == "chain" else -(-rows // 3)
    cells = [divmod(cell, width) for cell in range(rows)]
    assert tree.depths == tuple(level + column for level, column in cells[1:])
    for cell in range(1, rows):
        level, column = cells[cell]
        above = cells.index((level - 1, column) if level else (0, column - 1))
        assert tree.parents[cell - 1] == above - 1


def timer(adapter: ToyAdapter, **settings: Any) -> StepTimer:
    given = {"rows": [1, 3, 4], "contexts": [2, 9], "shape": "window", **settings}
    return StepTimer(adapter, **given)


def test_every_repeat_times_every_step_in_an_order_of_its_own() -> None:
    adapter = ToyAdapter()
    steps = timer(adapter, prefill_chunk=4)
    steps.prepare()
    before = len(adapter.forwards)
    found = list(steps.repeats(5))
    orders = [[one[:2] for one in found[start : start + 6]] for start in range(0, 30, 6)]
    assert all(sorted(order) == sorted(steps.points) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    ran = [(plans[0].prefix, plans[0].rows) for plans in adapter.forwards[before:]]
    assert ran == [one[:2] for one in found]  # one pass for each time, and no other
    assert all(seconds > 0 for *_, seconds in found)
    assert [cache.lengths for cache in adapter.caches] == [(2,), (9,)]  # nothing was committed


def test_steps_are_warmed_up() -> None:
    adapter = ToyAdapter()
    steps = timer(adapter)
    steps.prepare()
    ran = Counter((plans[0].prefix, plans[0].rows) for plans in adapter.forwards)
    assert all(ran[point] == 3 for point in steps.points)


def test_a_step_needs_room_in_the_context() -> None:
    # Three rows are a window of one column: the deepest row is 2 below the anchor, as with four.
    timer(ToyAdapter(max_positions=12))
    with pytest.raises(ConfigError) as caught:
        timer(ToyAdapter(max_positions=11))
    assert str(caught.value) == (
        "a step of 3 rows behind 9 tokens needs 12 positions and the model has 11; lower "
        "profile.contexts or profile.rows"
    )
    assert caught.value.key == "profile.contexts"
    with pytest.raises(ConfigError, match="of 4 rows behind 9 tokens needs 13 positions"):
        timer(ToyAdapter(max_positions=12), shape="chain")


def test_a_point_by_hand() -> None:
    base = [1.0, 2.0, 3.0, 4.0, 5.0]
    point = point_record(7, 4, [2.0, 4.0, 6.0, 8.0, 10.0], base=base, limit={"bytes": 3})
    assert point == {
        "context": 7,
        "rows": 4,
        "samples": [2.0, 4.0, 6.0, 8.0, 10.0],
        "median": 6.0,
        "quartiles": [4.0, 8.0],
        # A repeat is drawn for both: each resample has twice the time.
        "ratio": {"value": 2.0, "low": 2.0, "high": 2.0},
        "limit": {"bytes": 3},
    }
    # Other pairs: of all resamples 5.8 % have the first repeat as their median, and as many the
    # last one.
    ratio = point_record(7, 4, [10.0, 8.0, 6.0, 4.0, 2.0], base=base, limit=None)["ratio"]
    assert ratio == {"value": 2.0, "low": 0.4, "high": 10.0}


def test_a_point_of_a_repeat_that_was_cut_short() -> None:
    point = point_record(7, 4, [3.0, 5.0, 90.0], base=[1.0, 1.0], limit=None)
    assert point["median"] == 5.0
    assert point["ratio"]["value"] == 4.0  # of the repeats that both have
    assert point_record(7, 4, [3.0], base=[], limit=None)["ratio"] is None
    assert point_record(7, 1, [3.0], base=[2.0], limit=None)["ratio"] == {
        "value": 1.5,
        "low": None,
        "high": None,
    }


LIMIT = {"bytes": 4, "operations": 8, "read_seconds": 0.005, "arithmetic_seconds": 0.001}


def record(**changes: Any) -> dict[str, Any]:
    base = [0.01, 0.01, 0.01]
    points = [
        point_record(64, 1, base, base=base, limit=LIMIT),
        point_record(
            64, 8, [0.02, 0.02, 0.02], base=base, limit={**LIMIT, "arithmetic_seconds": 0.016}
        ),
        point_record(512, 1, [0.0125], base=[0.0125], limit=LIMIT),
    ]
    return {
        "format": FORMAT,
        "version": 1,
        "complete": True,
        "machine": {
            "machine": "a CPU",
            "gpu": None,
            "threads": 2,
            "openmp": {"OMP_PROC_BIND": "x"},
        },
        "model": {
            "name": "m<&>",
            "dtype": "float32",
            "device": "cpu",
            "adapter": "llama",
            "backend": "sdpa",
            "execution": "packed",
        },
        "settings": {"profile": {"repeats": 3}},
        "rates": {"read": {"sum": 2e10, "other": 1e10}, "arithmetic": {"product": 3e11}},
        "uncounted": None,
        "points": points,
        **changes,
    }


def test_the_report() -> None:
    assert render(record()).splitlines() == [
        "m<&>, float32, adapter llama, backend sdpa, execution packed, a CPU",
        "threads: 2, pinned",
        "reads 20.0 GB/s (sum), computes 300 GFLOP/s (product)",
        "",
        "| context | rows |   ms |    quartiles | T(n)/T(1) | 95 % interval | read limit "
        "| arithmetic limit | of the limit |",
        "|---------|-----:|-----:|-------------:|----------:|--------------:|-----------:"
        "|-----------------:|-------------:|",
        "| 64      |    1 | 10.0 | 10.0 to 10.0 |      1.00 |  1.00 to 1.00 |      5.000 "
        "|            1.000 |         50 % |",
        "| 64      |    8 | 20.0 | 20.0 to 20.0 |      2.00 |  2.00 to 2.00 |      5.000 "
        "|             16.0 |         80 % |",
        "| 512     |    1 | 12.5 | 12.5 to 12.5 |      1.00 |             - |      5.000 "
        "|            1.000 |         40 % |",
        "",
        "context 64 (# up to the limit)",
        "     1 " + "#" * 12 + "=" * 13 + " 10.0 ms",
        "     8 " + "#" * 40 + "=" * 10 + " 20.0 ms",
        "",
        "context 512 (# up to the limit)",
        "     1 " + "#" * 20 + "=" * 30 + " 12.5 ms",
    ]


def test_a_report_without_limits_and_cut_short() -> None:
    points = [point_record(64, 2, [0.001], base=[], limit=None)]
    text = render(record(points=points, rates=None, uncounted="it has experts", complete=False))
    assert "|    2 | 1.000 | 1.000 to 1.000 |         - |             - |          - |" in text
    assert "     2 " + "=" * 50 + " 1.000 ms" in text
    assert "no limit is given: it has experts" in text
    assert "INCOMPLETE: 1 to 1 of 3 repeats were measured" in text
    assert render(record(points=[])) == "nothing was measured"


def test_the_drawing() -> None:
    root = ElementTree.fromstring(draw(record()))
    name = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in root.iter(f"{name}text")]
    assert {"m<&>, float32, llama, packed", "context 64", "context 512", "its limit"} <= set(words)
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter(f"{name}circle")]
    # x: 0 at 70 and 8 rows at 570; y: 0 at 380 and 20 ms at 50.
    assert circles == [(132.5, 215.0), (570.0, 50.0), (132.5, 173.8)]
    lines = [element.get("points") for element in root.iter(f"{name}polyline")]
    assert "132.5,215.0 570.0,50.0" in lines
    assert "132.5,297.5 570.0,116.0" in lines  # the limit: 5 ms and 16 ms


@pytest.mark.parametrize("seconds", [1e-6, 0.00037, 0.0099, 0.01, 0.011, 0.5, 33.0])
@pytest.mark.parametrize("rows", [1, 3, 64, 257])
def test_a_drawing_of_any_size_stays_inside(seconds: float, rows: int) -> None:
    points = [
        point_record(1, 1, [seconds / 3], base=[seconds / 3], limit=None),
        point_record(2, rows, [seconds], base=[seconds], limit=None),
    ]
    text = draw(record(points=points))
    ElementTree.fromstring(text)
    for x, y in re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', text):
        assert 70 <= float(x) <= 570
        assert 50 <= float(y) <= 380
