"""A measured curve as JSON: what is in the file, made and read in one place.

The file is one object::

    format      "decodekit-step-times"
    version     1; a reader refuses a higher one
    complete    whether all repeats were measured
    machine     processor, threads, OpenMP's variables, GPU, versions
    model       name, dtype, adapter, backend, execution, device as they were picked
    settings    every setting of the run
    rates       what was measured of the machine: "read" in bytes per second and "arithmetic" in
                operations per second, each by the kernel that reached it
    uncounted   why there is no limit, where there is none, else null
    points      one for each context and number of rows, with
        context, rows   tokens in the cache; rows of the step
        samples         seconds of each repeat, in order
        median, quartiles (the lower and the upper one), in seconds
        ratio           to the fewest rows behind the same context, of medians: value, low, high
                        (95 %); low and high are null for fewer than two repeats, and all of it
                        where the fewest rows were not measured
        limit           bytes and operations that the step needs, and their seconds at the rates
                        above; null where they are not counted
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from decodekit.cli.bootstrap import bootstrap_interval, quantile
from decodekit.errors import ConfigError

__all__ = ["FORMAT", "VERSION", "is_record", "point_record", "read_record", "write_record"]

FORMAT = "decodekit-step-times"
VERSION = 1


def point_record(
    context: int,
    rows: int,
    samples: Sequence[float],
    *,
    base: Sequence[float],
    limit: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return one entry of ``points``.

    The interval of the ratio is the percentile bootstrap over repeats. A repeat is drawn for both
    times at once: what slows the machine down for a while slows both.

    Args:
        context: Tokens in the cache.
        rows: Rows of the step.
        samples: Seconds of each repeat, one or more.
        base: Those of the fewest rows behind the same context; of the same repeats, as far as they
            go.
        limit: What the step needs, see above.
    """
    paired = min(len(samples), len(base))

    def ratio(places: Sequence[int]) -> float:
        return median([samples[at] for at in places]) / median([base[at] for at in places])

    interval = bootstrap_interval(paired, ratio)
    return {
        "context": context,
        "rows": rows,
        "samples": list(samples),
        "median": median(samples),
        "quartiles": [quantile(samples, 0.25), quantile(samples, 0.75)],
        "ratio": {
            "value": ratio(range(paired)),
            "low": interval and interval.low,
            "high": interval and interval.high,
        }
        if paired
        else None,
        "limit": None if limit is None else dict(limit),
    }


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Write a curve; an earlier file is replaced."""
    text = json.dumps(record, ensure_ascii=False, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def is_record(path: str) -> bool:
    """Return whether a file looks like a stored curve; False if it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return f'"{FORMAT}"' in file.read(200)
    except (OSError, ValueError):
        return False


def read_record(path: str) -> dict[str, Any]:
    """Return a stored curve, after checking that it is one.

    Raises:
        ConfigError: It cannot be read, is something else, or was written by another version.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the step times in {path}: {error.strerror}") from error
    except ValueError as error:  # no JSON, no UTF-8, or a name with a null byte
        raise ConfigError(f"{path!r} is no JSON file: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{path} holds no step times; it must be a profile.output of job=profile")
    if record.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {record.get('version')!r} of the format and this decodekit reads "
            f"{VERSION}; measure again with job=profile"
        )
    points = record.get("points")
    if not isinstance(points, list) or not points or not all(map(_is_point, points)):
        raise ConfigError(f"{path} is damaged: its points are not as job=profile writes them")
    return record


def _is_point(point: Any) -> bool:
    try:
        numbers = (point["context"], point["rows"], point["median"], *point["quartiles"])
        wholes = all(isinstance(number, int) for number in numbers[:2])
        return wholes and len(numbers) == 5 and all(number > 0 for number in numbers)
    except (KeyError, TypeError):
        return False
