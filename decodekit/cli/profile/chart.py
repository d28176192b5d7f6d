"""A measured curve as a drawing: SVG, which any browser shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["draw"]

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 50, 60  # margins
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by colour-blind people too (Okabe and Ito)."""


def draw(record: Mapping[str, Any]) -> str:
    """Return the drawing of a record, which ``decodekit.cli.profile.record`` describes.

    For each context: medians joined by a line, quartiles as bars, and the limit as a dashed line.
    Both axes begin at 0, so that a flat curve looks flat.

    Args:
        record: With at least one point.
    """
    points: Sequence[Mapping[str, Any]] = record["points"]
    most = max(point["rows"] for point in points)
    slowest = 1000 * max(max(point["quartiles"][1], _limit(point) or 0.0) for point in points)
    across, up = _ticks(most), _ticks(slowest)

    def x(rows: float) -> float:
        return _LEFT + rows / across[-1] * (_WIDTH - _LEFT - _RIGHT)

    def y(seconds: float) -> float:
        return _HEIGHT - _BOTTOM - 1000 * seconds / up[-1] * (_HEIGHT - _TOP - _BOTTOM)

    model = record["model"]
    title = f"{model['name']}, {model['dtype']}, {model['adapter']}, {model['execution']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 28, title, size=15),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 16, "rows of a step", anchor="middle"),
        _text(_LEFT - 8, 34, "milliseconds", anchor="end"),
    ]
    for tick in across:
        parts.append(_line(x(tick), y(0), x(tick), y(0) + 5, "black"))
        parts.append(_text(x(tick), y(0) + 19, f"{tick:g}", anchor="middle"))
    for tick in up:
        level = y(tick / 1000)
        parts.append(_line(_LEFT, level, _WIDTH - _RIGHT, level, "#dddddd"))
        parts.append(_text(_LEFT - 8, level + 4, f"{tick:g}", anchor="end"))
    for number, context in enumerate(dict.fromkeys(point["context"] for point in points)):
        colour = _COLOURS[number % len(_COLOURS)]
        own = [point for point in points if point["context"] == context]
        medians = [(x(point["rows"]), y(point["median"])) for point in own]
        parts.append(_path(medians, colour))
        for point, (across_at, level) in zip(own, medians, strict=True):
            low, high = point["quartiles"]
            parts.append(_line(across_at, y(low), across_at, y(high), colour))
            parts.append(f'<circle cx="{across_at:.1f}" cy="{level:.1f}" r="3" fill="{colour}"/>')
        limits = [(x(p["rows"]), y(least)) for p in own if (least := _limit(p)) is not None]
        label, beside = _TOP + 40 * number, _WIDTH - _RIGHT + 16
        parts.append(_path([(beside, label), (beside + 24, label)], colour))
        parts.append(_text(beside + 30, label + 4, f"context {context}"))
        if limits:
            parts.append(_path(limits, colour, dashed=True))
            parts.append(_path([(beside, label + 16), (beside + 24, label + 16)], colour, True))
            parts.append(_text(beside + 30, label + 20, "its limit"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _limit(point: Mapping[str, Any]) -> float | None:
    limit = point["limit"]
    return None if limit is None else max(limit["read_seconds"], limit["arithmetic_seconds"])


def _ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at least ``most``, six to eleven of them or so."""
    step = 10.0 ** math.floor(math.log10(most / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * 10 >= most)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"/>'


def _path(points: Sequence[tuple[float, float]], colour: str, dashed: bool = False) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
