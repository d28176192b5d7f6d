"""From measurements to tables, digit by digit."""

from __future__ import annotations

from decodekit.bench.measurement import Measurement, Run
from decodekit.bench.report import render
from decodekit.table import render_table


def measured(
    contender: str,
    prompt: str,
    *,
    seconds: float,
    tokens: int = 10,
    steps: int = 10,
    rows: float | None = 1.0,
    category: str = "code",
    repeat: int = 0,
    equal: bool = True,
) -> Measurement:
    run = Run(
        tokens=[0] * tokens,
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
        equal=equal,
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


def test_one_table_with_medians_ratios_by_prompt_and_totals() -> None:
    table = render(
        [
            measured("plain", "p1", seconds=1.0),
            measured("look", "p1", seconds=0.5, steps=4, rows=8.0),
            measured("plain", "p2", seconds=2.0),
            measured("look", "p2", seconds=2.0, steps=6, rows=3.0, equal=False),
            measured("plain", "p3", seconds=4.0),
            measured("look", "p3", seconds=1.0, steps=5, rows=5.0),
        ]
    )
    # tokens/s: medians of 10/1, 10/2, 10/4 and of 10/0.5, 10/2, 10/1. ratio: the median of
    # 1/0.5, 2/2, 4/1. tokens/step: 30/30 and 30/15. rows/step: (4*8 + 6*3 + 5*5) / 15.
    assert table.splitlines() == [
        "| all (3 prompts) | tokens/s | ratio | tokens/step | rows/step | equal |",
        "|-----------------|---------:|------:|------------:|----------:|------:|",
        "| plain           |      5.0 |  1.00 |        1.00 |       1.0 |   3/3 |",
        "| look            |     10.0 |  2.00 |        2.00 |       5.0 |   2/3 |",
    ]


def test_unknown_rows_are_a_dash() -> None:
    table = render([measured("transformers greedy", "p1", seconds=1.0, rows=None)])
    cells = [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
    assert cells == ["transformers greedy", "10.0", "1.00", "1.00", "-", "1/1"]


def test_repeats_are_compared_with_the_same_repeat() -> None:
    table = render(
        [
            measured("plain", "p1", seconds=1.0, repeat=0),
            measured("look", "p1", seconds=0.5, repeat=0),
            measured("plain", "p1", seconds=3.0, repeat=1),
            measured("look", "p1", seconds=1.0, repeat=1),
        ]
    )
    assert "all (1 prompts)" in table
    cells = [cell.strip() for cell in table.splitlines()[3].strip("|").split("|")]
    assert cells[2] == "2.50"  # the median of 1/0.5 and 3/1
    assert cells[5] == "2/2"


def test_several_categories_get_a_table_each() -> None:
    tables = render(
        [
            measured("plain", "p1", seconds=1.0, category="code"),
            measured("plain", "p2", seconds=2.0, category="chat"),
        ]
    ).split("\n\n")
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
    cells = [cell.strip() for cell in table.splitlines()[3].strip("|").split("|")]
    assert cells[2] == "3.00"  # the median of 1/0.5 and 8/2


def test_a_contender_that_said_nothing_has_a_row_too() -> None:
    """``max_new_tokens=0``: no tokens, no steps, no time."""
    table = render([measured("plain", "p1", seconds=0.0, tokens=0, steps=0)])
    cells = [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
    assert (cells[0], cells[3], cells[4]) == ("plain", "-", "-")
