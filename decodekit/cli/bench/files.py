"""The measurements of a benchmark as a file: written as they come, and read again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decodekit.cli.bench.measurement import Measurement, Run
from decodekit.errors import ConfigError

__all__ = ["read_measurements", "write_measurements"]


def write_measurements(
    path: str, measurements: Iterable[Measurement], *, header: dict[str, Any] | None = None
) -> None:
    """Write measurements as JSON lines: behind what is there, or, with a header, as a new file.

    Args:
        path: The file.
        measurements: One a line.
        header: The first line's ``header``: what has to be known to judge the numbers.
    """
    records: list[dict[str, Any]] = [] if header is None else [{"header": header}]
    records += [asdict(measurement) for measurement in measurements]
    with Path(path).open("a" if header is None else "w", encoding="utf-8") as output:
        output.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read_measurements(path: str) -> tuple[dict[str, Any], list[Measurement]]:
    """Return the header and the measurements of a file that ``job=bench`` has written.

    Raises:
        ConfigError: It cannot be read, or is no such file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the measurements in {path}: {reason}") from error
    try:
        header = json.loads(lines[0])["header"]
        if not isinstance(header, dict):
            raise TypeError("a header is an object")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not begin with a header; it must be a bench.output of job=bench"
        ) from error
    measurements = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            measurements.append(Measurement(**{**record, "run": Run(**record["run"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"line {number} of {path} is no measurement; if the benchmark was killed while it "
                "wrote it, delete the line"
            ) from error
    return header, measurements
