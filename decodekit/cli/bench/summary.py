"""From measurements to figures: one contender against the reference, over prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from decodekit.cli.bench.measurement import Measurement
from decodekit.cli.bootstrap import Interval, bootstrap_interval
from decodekit.decoder.runs import first_difference

__all__ = ["Difference", "Summary", "categories_of", "prompts_of", "reference_of", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A prompt on which a contender gave other tokens than the reference.

    Attributes:
        prompt: The prompt's id.
        token: The first new token that is another one, from 0; of several runs the earliest.
    """

    prompt: str
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One contender over some prompts.

    Attributes:
        contender: Its name.
        prompts: Prompts that it and the reference were run on.
        tokens_per_second: The median over prompts.
        ratio: How many times as fast as the reference it is; None if no prompt tells.
        interval: The 95 % interval of the ratio; None for fewer than two prompts.
        tokens_per_step: All tokens over all forward passes; None without a pass.
        rows_per_step: The mean rows of a pass; None if unknown.
        differences: Where its tokens are not those of the reference.
    """

    contender: str
    prompts: int
    tokens_per_second: float
    ratio: float | None
    interval: Interval | None
    tokens_per_step: float | None
    rows_per_step: float | None
    differences: tuple[Difference, ...]


def categories_of(measurements: Sequence[Measurement]) -> list[str]:
    """Return the categories in the order in which they come."""
    return list(dict.fromkeys(m.category for m in measurements))


def prompts_of(measurements: Sequence[Measurement]) -> int:
    """Return the number of prompts; the same id in two categories is two prompts."""
    return len({(m.category, m.prompt) for m in measurements})


def reference_of(measurements: Sequence[Measurement], name: str | None = None) -> str:
    """Return the contender that the others are compared with: ``name``, or else the first.

    Raises:
        KeyError: There is none of that name; its argument lists those that there are.
    """
    names = list(dict.fromkeys(m.contender for m in measurements))
    if name is None:
        return names[0]
    if name not in names:
        raise KeyError(names)
    return name


def summarize(measurements: Sequence[Measurement], *, reference: str) -> list[Summary]:
    """Return a summary of every contender, in the order in which they come.

    The time of a contender on a prompt is the median over its repeats of the seconds for a token,
    so that one interruption of the machine does not count. The *ratio* is the geometric mean over
    prompts of the reference's time over the contender's. A mean of this kind counts every prompt
    alike, however long its answer; and it does not depend on who is the reference: the ratio of A
    to B is one over that of B to A, and the ratio of A to C is that of A to B times that of B to C.
    Medians and arithmetic means of ratios have neither property (Fleming and Wallace,
    Communications of the ACM 29, 1986).

    The *interval* is that of the percentile bootstrap over prompts, not over runs: repeats of one
    prompt are not independent, and what is asked is how the ratio would be on other prompts of the
    kind. All contenders are resampled with the same draws.

    Args:
        measurements: Of any prompts, all contenders on each.
        reference: The name of the contender that the others are compared with.
    """
    base = _seconds_per_token(measurements, reference)
    expected = {_run(m): m.run.tokens for m in measurements if m.contender == reference}
    return [
        _summary(name, [m for m in measurements if m.contender == name], base, expected)
        for name in dict.fromkeys(m.contender for m in measurements)
    ]


def _summary(
    name: str,
    own: Sequence[Measurement],
    base: dict[tuple[str, str], float],
    expected: dict[tuple[str, str, int], list[int]],
) -> Summary:
    times = _seconds_per_token(own, name)
    logs = [math.log(base[prompt] / times[prompt]) for prompt in times if prompt in base]

    def ratio(places: Sequence[int]) -> float:
        return math.exp(fmean(logs[place] for place in places))

    steps = sum(m.run.steps for m in own)
    rows = [m.run.rows_per_step * m.run.steps for m in own if m.run.rows_per_step is not None]
    return Summary(
        contender=name,
        prompts=prompts_of(own),
        tokens_per_second=median([1 / seconds for seconds in times.values()] or [0.0]),
        ratio=ratio(range(len(logs))) if logs else None,
        interval=bootstrap_interval(len(logs), ratio),
        tokens_per_step=sum(len(m.run.tokens) for m in own) / steps if steps else None,
        rows_per_step=sum(rows) / steps if rows and steps else None,
        differences=tuple(_differences(own, expected)),
    )


def _seconds_per_token(
    measurements: Sequence[Measurement], contender: str
) -> dict[tuple[str, str], float]:
    """Return a contender's time for a token on each prompt; without those that it has none on."""
    times: dict[tuple[str, str], list[float]] = {}
    for m in measurements:
        if m.contender == contender and m.run.tokens and m.run.seconds > 0:
            times.setdefault((m.category, m.prompt), []).append(m.run.seconds / len(m.run.tokens))
    return {prompt: median(seconds) for prompt, seconds in times.items()}


def _differences(
    own: Sequence[Measurement], expected: dict[tuple[str, str, int], list[int]]
) -> list[Difference]:
    first: dict[tuple[str, str], int] = {}
    for m in own:
        place = first_difference(expected.get(_run(m), m.run.tokens), m.run.tokens)
        if place is not None:
            prompt = (m.category, m.prompt)
            first[prompt] = min(place, first.get(prompt, place))
    return [Difference(prompt=prompt, token=token) for (_, prompt), token in first.items()]


def _run(measurement: Measurement) -> tuple[str, str, int]:
    """Return what the measurements of all contenders in one turn have in common."""
    return measurement.category, measurement.prompt, measurement.repeat
