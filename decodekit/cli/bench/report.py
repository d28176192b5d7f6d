"""The tables of a benchmark: speed with intervals, by category and in all, and equal tokens."""

from __future__ import annotations

from collections.abc import Sequence

from decodekit.cli.bench.measurement import Measurement
from decodekit.cli.bench.summary import Summary, categories_of, prompts_of, reference_of, summarize
from decodekit.cli.table import render_table

__all__ = ["ENOUGH_PROMPTS", "render"]

ENOUGH_PROMPTS = 5
"""Prompts of a category from which an interval says something."""

_SHOWN = 5  # differences that are listed one by one


def render(measurements: Sequence[Measurement], *, reference: str | None = None) -> str:
    """Return the tables: all prompts, then one per category if there are several, then tokens.

    ``ratio`` is how many times as fast as the reference a contender is; see ``summarize``.
    ``tokens/step`` and ``rows/step`` are totals over totals.

    Args:
        measurements: What was measured.
        reference: The contender that the others are compared with; None for the first.

    Raises:
        KeyError: There is no such contender; see ``reference_of``.
    """
    if not measurements:
        return "nothing was measured"
    base = reference_of(measurements, reference)
    groups = {
        name: [m for m in measurements if m.category == name]
        for name in categories_of(measurements)
    }
    whole = summarize(measurements, reference=base)
    parts = [_speed("all", whole, measurements)]
    if len(groups) > 1:
        parts += [
            _speed(name, summarize(group, reference=base), group) for name, group in groups.items()
        ]
    parts += [_tokens(base, whole)]
    few = [name for name, group in groups.items() if prompts_of(group) < ENOUGH_PROMPTS]
    if few:
        parts.append(
            f"fewer than {ENOUGH_PROMPTS} prompts in {', '.join(few)}: an interval from so few is "
            "too narrow"
        )
    return "\n\n".join(parts)


def _speed(title: str, summaries: Sequence[Summary], measurements: Sequence[Measurement]) -> str:
    head = f"{title} ({prompts_of(measurements)} prompts)"
    rows = [[head, "tokens/s", "ratio", "95 % interval", "tokens/step", "rows/step", "equal"]]
    for one in summaries:
        interval = "-"
        if one.interval is not None:
            interval = f"{one.interval.low:.2f} to {one.interval.high:.2f}"
        rows.append(
            [
                one.contender,
                f"{one.tokens_per_second:.1f}",
                _number(one.ratio, 2),
                interval,
                _number(one.tokens_per_step, 2),
                _number(one.rows_per_step, 1),
                f"{one.prompts - len(one.differences)}/{one.prompts}",
            ]
        )
    return render_table(rows)


def _tokens(reference: str, summaries: Sequence[Summary]) -> str:
    """Return who gave other tokens than the reference, on which prompts, and from where on."""
    if not any(one.differences for one in summaries):
        return f"every contender gave the tokens of {reference} on every prompt"
    rows = [[f"tokens of {reference}", "prompts", "different", "first different token (prompt)"]]
    for one in summaries:
        if one.contender == reference:
            continue
        places = [f"{apart.token} ({apart.prompt})" for apart in one.differences[:_SHOWN]]
        if len(one.differences) > _SHOWN:
            places.append(f"{len(one.differences) - _SHOWN} more")
        rows.append(
            [one.contender, str(one.prompts), str(len(one.differences)), ", ".join(places) or "-"]
        )
    return render_table(rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
