"""From measurements to a table: medians, and ratios taken prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from decodekit.bench.measurement import Measurement
from decodekit.table import render_table

__all__ = ["render"]


def render(measurements: Sequence[Measurement]) -> str:
    """Return the tables: all prompts, then one per category if there are several.

    ``ratio`` is the median over prompts of the first contender's seconds over this one's: how many
    times as fast it is. ``tokens/step`` and ``rows/step`` are totals over totals.
    """
    if not measurements:
        return "nothing was measured"
    categories = list(dict.fromkeys(m.category for m in measurements))
    parts = [_table("all", measurements)]
    if len(categories) > 1:
        parts += [
            _table(name, [m for m in measurements if m.category == name]) for name in categories
        ]
    return "\n\n".join(parts)


def _place(measurement: Measurement) -> tuple[str, str, int]:
    """Return what the measurements of all contenders on one prompt have in common."""
    return measurement.category, measurement.prompt, measurement.repeat


def _table(title: str, measurements: Sequence[Measurement]) -> str:
    names = list(dict.fromkeys(m.contender for m in measurements))
    base = {_place(m): m.run.seconds for m in measurements if m.contender == names[0]}
    prompts = len({(m.category, m.prompt) for m in measurements})
    rows = [
        [f"{title} ({prompts} prompts)", "tokens/s", "ratio", "tokens/step", "rows/step", "equal"]
    ]
    for name in names:
        own = [m for m in measurements if m.contender == name]
        tokens = sum(len(m.run.tokens) for m in own)
        steps = sum(m.run.steps for m in own)
        timed = [m for m in own if m.run.seconds > 0]
        speed = median([len(m.run.tokens) / m.run.seconds for m in timed] or [0.0])
        ratio = median([base[_place(m)] / m.run.seconds for m in timed] or [1.0])
        rows_known = [m for m in own if m.run.rows_per_step is not None]
        mean_rows = sum((m.run.rows_per_step or 0.0) * m.run.steps for m in rows_known)
        rows.append(
            [
                name,
                f"{speed:.1f}",
                f"{ratio:.2f}",
                f"{tokens / steps:.2f}" if steps else "-",
                f"{mean_rows / steps:.1f}" if rows_known and steps else "-",
                f"{sum(m.equal for m in own)}/{len(own)}",
            ]
        )
    return render_table(rows)
