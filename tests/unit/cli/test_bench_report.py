"""From measurements to tables, digit by digit."""

from __future__ import annotations

import pytest

from decodekit.cli.bench.measurement import Measurement, Run
from decodekit.cli.bench.report import render
from decodekit.cli.table import render_table


def measured(
    contender: str,
    prompt: str,
    *,
    seconds: float,
    tokens: int = 10,
    wrong_from: int | None = None,
    steps: int = 10,
    rows: float | None = 1.0,
    category: str = "code",
    repeat: int = 0,
) -> Measurement:
    right = tokens if wrong_from is None else wrong_from
    run = Run(
        tokens=[0] * right + [1] * (tokens - right),
        steps=steps,
        rows_per_step=rows,
        seconds=seconds,
        time_to_first_token=None,
    )
    return Measurement(
        prompt=prompt,
        category=category,
        contender=contender,
        repeat=repeat,
        equal=wrong_from is None,
        run=run,
    )


def test_nothing_measured() -> None:
    assert render([]) == "nothing was measured"


def test_a_cell_cannot_break_its_table() -> None:
    assert render_table([["a|b", "c"], ["d\ne", "f"]]).splitlines() == [
        "| a\\|b | c |",
        "|------|--:|",
        "| d e  | f |",
    ]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_medians_ratios_totals_and_tokens() -> None:
    report = render(
        [
            measured("plain", "p1", seconds=1.0),
            measured("look", "p1", seconds=0.5, steps=4, rows=8.0),
            measured("plain", "p2", seconds=2.0),
            measured("look", "p2", seconds=2.0, steps=6, rows=3.0, wrong_from=7),
            measured("plain", "p3", seconds=4.0),
            measured("look", "p3", seconds=1.0, steps=5, rows=5.0),
        ]
    )
    # tokens/s: medians of 10/1, 10/2, 10/4 and of 10/0.5, 10/2, 10/1. ratio: the geometric mean of
    # 2, 1, 4, whose lowest and highest resamples are three times the same. tokens/step: 30/30 and
    # 30/15. rows/step: (4*8 + 6*3 + 5*5) / 15.
    assert report.splitlines() == [
        "| all (3 prompts) | tokens/s | ratio | 95 % interval | tokens/step | rows/step | equal |",
        "|-----------------|---------:|------:|--------------:|------------:|----------:|------:|",
        "| plain           |      5.0 |  1.00 |  1.00 to 1.00 |        1.00 |       1.0 |   3/3 |",
        "| look            |     10.0 |  2.00 |  1.00 to 4.00 |        2.00 |       5.0 |   2/3 |",
        "",
        "| tokens of plain | prompts | different | first different token (prompt) |",
        "|-----------------|--------:|----------:|-------------------------------:|",
        "| look            |       3 |         1 |                         7 (p2) |",
        "",
        "fewer than 5 prompts in code: an interval from so few is too narrow",
    ]


def test_another_reference() -> None:
    measurements = [
        measured("plain", "p1", seconds=1.0),
        measured("look", "p1", seconds=0.5, wrong_from=0),
        measured("other", "p1", seconds=0.25),
    ]
    lines = render(measurements, reference="look").splitlines()
    assert [cells(line)[2] for line in lines[2:5]] == ["0.50", "1.00", "2.00"]
    assert [cells(line)[6] for line in lines[2:5]] == ["0/1", "1/1", "0/1"]
    assert cells(lines[6])[0] == "tokens of look"
    assert cells(lines[8]) == ["plain", "1", "1", "0 (p1)"]
    with pytest.raises(KeyError):
        render(measurements, reference="lok")


def test_many_differences_are_not_all_listed() -> None:
    measurements = [
        measured(name, f"p{number}", seconds=1.0, wrong_from=number if name == "look" else None)
        for number in range(8)
        for name in ("plain", "look", "same")
    ]
    lines = render(measurements).splitlines()
    look, same = lines[-2:]
    assert cells(look) == ["look", "8", "8", "0 (p0), 1 (p1), 2 (p2), 3 (p3), 4 (p4), 3 more"]
    assert cells(same) == ["same", "8", "0", "-"]


def test_enough_equal_prompts_need_no_remark() -> None:
    measurements = [
        measured(name, f"p{number}", seconds=1.0)
        for number in range(5)
        for name in ("plain", "look")
    ]
    last = render(measurements).splitlines()[-1]
    assert last == "every contender gave the tokens of plain on every prompt"


def test_unknown_rows_are_a_dash() -> None:
    table = render([measured("transformers greedy", "p1", seconds=1.0, rows=None)])
    row = cells(table.splitlines()[2])
    assert row == ["transformers greedy", "10.0", "1.00", "-", "1.00", "-", "1/1"]


def test_a_prompt_that_is_run_several_times_is_one() -> None:
    table = render(
        [
            measured("plain", "p1", seconds=1.0, repeat=0),
            measured("look", "p1", seconds=0.5, repeat=0),
            measured("plain", "p1", seconds=3.0, repeat=1),
            measured("look", "p1", seconds=1.5, repeat=1, wrong_from=3),
        ]
    )
    assert "all (1 prompts)" in table
    row = cells(table.splitlines()[3])
    assert row[1:4] == ["10.0", "2.00", "-"]  # the median of 0.5 and 1.5 s; no interval of one
    assert row[6] == "0/1"


def test_several_categories_get_a_table_each() -> None:
    tables = render(
        [
            measured("plain", "p1", seconds=1.0, category="code"),
            measured("plain", "p2", seconds=2.0, category="chat"),
        ]
    ).split("\n\n")[:3]
    assert [table.split(" |")[0].lstrip("| ") for table in tables] == [
        "all (2 prompts)",
        "code (1 prompts)",
        "chat (1 prompts)",
    ]


def test_equal_ids_in_two_categories_are_two_prompts() -> None:
    table = render(
        [
            measured("plain", "1", seconds=1.0, category="code"),
            measured("look", "1", seconds=0.5, category="code"),
            measured("plain", "1", seconds=8.0, category="chat"),
            measured("look", "1", seconds=2.0, category="chat"),
        ]
    ).split("\n\n")[0]
    assert "all (2 prompts)" in table
    row = cells(table.splitlines()[3])
    assert row[2:4] == ["2.83", "2.00 to 4.00"]  # the geometric mean of 1/0.5 and 8/2


def test_a_contender_that_said_nothing_has_a_row_too() -> None:
    """``max_new_tokens=0``: no tokens, no steps, no time."""
    table = render([measured("plain", "p1", seconds=0.0, tokens=0, steps=0)])
    row = cells(table.splitlines()[2])
    assert row == ["plain", "0.0", "-", "-", "-", "-", "1/1"]
