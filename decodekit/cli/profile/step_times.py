"""A measured curve T(rows) to ask for times between the points that were measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from decodekit.cli.profile.record import read_record
from decodekit.errors import ConfigError, require_at_least

__all__ = ["StepTime", "StepTimes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One point of a curve.

    Attributes:
        context: Tokens in the cache.
        rows: Rows of the step.
        seconds: The median time of the step.
    """

    context: int
    rows: int
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """The time of a step by its rows, behind one or several contexts.

    Attributes:
        points: What was measured, in any order.
        facts: What the file says besides: machine, model, settings.

    Raises:
        ConfigError: There are no points, two for the same rows and context, or a time that is none.
    """

    points: tuple[StepTime, ...]
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("step times need at least one point")
        for point in self.points:
            require_at_least(point.rows, 1, key="rows")
            require_at_least(point.context, 0, key="context")
            if not 0 < point.seconds < float("inf"):
                raise ConfigError(f"a step cannot take {point.seconds} seconds", key="seconds")
        if len({(point.context, point.rows) for point in self.points}) < len(self.points):
            raise ConfigError("step times must have one point for each context and rows")

    @classmethod
    def read(cls, path: str) -> StepTimes:
        """Return the curve in a ``profile.output`` of ``job=profile``.

        Raises:
            ConfigError: The file cannot be read, or is something else.
        """
        record = read_record(path)
        return cls(
            points=tuple(
                StepTime(context=one["context"], rows=one["rows"], seconds=one["median"])
                for one in record["points"]
            ),
            facts={key: value for key, value in record.items() if key != "points"},
        )

    @classmethod
    def of(cls, curve: Mapping[int, float], *, context: int = 0) -> StepTimes:
        """Return a curve that is made up: seconds by rows, whatever the context."""
        return cls(
            tuple(
                StepTime(context=context, rows=rows, seconds=seconds)
                for rows, seconds in curve.items()
            )
        )

    @cached_property
    def _curves(self) -> dict[int, tuple[list[int], list[float]]]:
        """The rows and the times of each context, both ascending by rows."""
        curves: dict[int, tuple[list[int], list[float]]] = {}
        for point in sorted(self.points, key=lambda one: (one.context, one.rows)):
            rows, seconds = curves.setdefault(point.context, ([], []))
            rows.append(point.rows)
            seconds.append(point.seconds)
        return curves

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """The contexts that were measured, ascending."""
        return tuple(self._curves)

    @cached_property
    def most_rows(self) -> int:
        """The largest number of rows for which there is a time behind every context."""
        return min(rows[-1] for rows, _ in self._curves.values())

    def seconds(self, rows: float, context: float | None = None) -> float:
        """Return the time of a step, piecewise linear in its rows and in its context.

        Beyond the contexts that were measured it is that of the nearest one. Beyond the rows that
        were measured there is none: a curve bends where the arithmetic begins to cost.

        Args:
            rows: Rows of the step; a mean of several may be no whole number.
            context: Tokens in the cache; None for the least that was measured.

        Raises:
            ConfigError: There is no time for so few or so many rows.
        """
        contexts = self.contexts
        if context is None or context <= contexts[0]:
            return self._behind(contexts[0], rows)
        if context >= contexts[-1]:
            return self._behind(contexts[-1], rows)
        above = bisect_left(contexts, context)
        low, high = contexts[above - 1], contexts[above]
        share = (context - low) / (high - low)
        return _between(self._behind(low, rows), self._behind(high, rows), share)

    def _behind(self, context: int, rows: float) -> float:
        known, seconds = self._curves[context]
        if not known[0] <= rows <= known[-1]:
            raise ConfigError(
                f"behind a context of {context} steps of {known[0]} to {known[-1]} rows were "
                f"measured, not of {rows:g}; measure more with profile.rows",
                key="profile.rows",
                value=rows,
            )
        return _interpolated(known, seconds, rows)


def _interpolated(known: Sequence[int], values: Sequence[float], at: float) -> float:
    above = bisect_left(known, at)
    if known[above] == at:
        return values[above]
    low, high = known[above - 1], known[above]
    return _between(values[above - 1], values[above], (at - low) / (high - low))


def _between(low: float, high: float, share: float) -> float:
    return low + share * (high - low)
