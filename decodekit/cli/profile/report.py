"""A measured curve for people to read: a table, and bars for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decodekit.cli.table import render_table

__all__ = ["render"]

_WIDTH = 50  # of the longest bar


def render(record: Mapping[str, Any]) -> str:
    """Return the report of a record, which ``decodekit.cli.profile.record`` describes.

    ``of the limit`` is the larger of the two limits over the time that was measured: what share of
    what the machine can do was reached.
    """
    points: Sequence[Mapping[str, Any]] = record["points"]
    if not points:
        return "nothing was measured"
    parts = [_facts(record), _table(points)]
    for context in dict.fromkeys(point["context"] for point in points):
        parts.append(_bars(context, [point for point in points if point["context"] == context]))
    if record["uncounted"]:
        parts.append(f"no limit is given: {record['uncounted']}")
    if not record["complete"]:
        counts = [len(point["samples"]) for point in points]
        asked = record["settings"]["profile"]["repeats"]
        parts.append(f"INCOMPLETE: {min(counts)} to {max(counts)} of {asked} repeats were measured")
    return "\n\n".join(parts)


def _facts(record: Mapping[str, Any]) -> str:
    model, rates = record["model"], record["rates"]
    lines = [
        f"{model['name']}, {model['dtype']}, adapter {model['adapter']}, backend "
        f"{model['backend']}, execution {model['execution']}, "
        f"{record['machine']['gpu'] if model['device'] != 'cpu' else record['machine']['machine']}"
    ]
    if model["device"] == "cpu":
        pinned = "pinned" if "OMP_PROC_BIND" in record["machine"]["openmp"] else "not pinned"
        lines.append(f"threads: {record['machine']['threads']}, {pinned}")
    if rates is not None:
        read, name = _best(rates["read"])
        arithmetic, kernel = _best(rates["arithmetic"])
        lines.append(
            f"reads {read / 1e9:.1f} GB/s ({name}), computes {arithmetic / 1e9:.0f} GFLOP/s "
            f"({kernel})"
        )
    return "\n".join(lines)


def _best(rates: Mapping[str, float]) -> tuple[float, str]:
    return max((rate, name) for name, rate in rates.items())


def _table(points: Sequence[Mapping[str, Any]]) -> str:
    fewest = min(point["rows"] for point in points)
    head = ["context", "rows", "ms", "quartiles", f"T(n)/T({fewest})", "95 % interval"]
    rows = [[*head, "read limit", "arithmetic limit", "of the limit"]]
    for point in points:
        low, high = point["quartiles"]
        ratio = point["ratio"]
        cells = [
            str(point["context"]),
            str(point["rows"]),
            _ms(point["median"]),
            f"{_ms(low)} to {_ms(high)}",
            f"{ratio['value']:.2f}" if ratio else "-",
            "-",
        ]
        if ratio and ratio["low"] is not None:
            cells[-1] = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
        rows.append([*cells, *_limits(point)])
    return render_table(rows)


def _limits(point: Mapping[str, Any]) -> list[str]:
    limit = point["limit"]
    if limit is None:
        return ["-", "-", "-"]
    read, arithmetic = limit["read_seconds"], limit["arithmetic_seconds"]
    share = max(read, arithmetic) / point["median"]
    return [_ms(read), _ms(arithmetic), f"{100 * share:.0f} %"]


def _bars(context: int, points: Sequence[Mapping[str, Any]]) -> str:
    """Return one bar for each number of rows, ``#`` for the time up to the limit."""
    longest = max(point["median"] for point in points)
    lines = [f"context {context}" + (" (# up to the limit)" if points[0]["limit"] else "")]
    for point in points:
        length = max(1, round(_WIDTH * point["median"] / longest))
        bar = "=" * length
        if point["limit"]:
            least = max(point["limit"]["read_seconds"], point["limit"]["arithmetic_seconds"])
            inside = min(length, round(_WIDTH * least / longest))
            bar = "#" * inside + "=" * (length - inside)
        lines.append(f"{point['rows']:>6} {bar} {_ms(point['median'])} ms")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"
