"""``decodekit report FILE``: the tables of a benchmark or of a profile that was stored."""

from __future__ import annotations

from collections.abc import Sequence

from decodekit.cli.bench.files import read_measurements
from decodekit.cli.bench.report import render as render_bench
from decodekit.cli.profile.record import is_record, read_record
from decodekit.cli.profile.report import render as render_profile
from decodekit.errors import ConfigError, nearest

__all__ = ["run_report"]


def run_report(arguments: Sequence[str]) -> int:
    """Print the tables of a stored file.

    Args:
        arguments: A ``bench.output``, perhaps with ``reference=NAME``; or a ``profile.output``.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: The file cannot be read, or there is no such contender.
    """
    files = [one for one in arguments if not one.startswith("reference=")]
    given = [one.partition("=")[2] for one in arguments if one.startswith("reference=")]
    if len(files) != 1 or len(given) > 1:
        raise ConfigError("give one file: decodekit report FILE [reference=NAME]")
    (path,) = files
    if is_record(path):
        if given:
            raise ConfigError(f"{path} is a profile, which has no reference", key="reference")
        record = read_record(path)
        try:
            text = render_profile(record)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} is damaged: {type(error).__name__} {error}; measure again with job=profile"
            ) from error
        print(text)
        return 0
    header, measurements = read_measurements(path)
    reference = given[0] if given else header.get("reference")
    try:
        print(render_bench(measurements, reference=reference))
    except KeyError as error:
        (names,) = error.args
        raise ConfigError(
            f"the reference {reference!r} is no contender: {nearest(str(reference), names)}",
            key="reference",
        ) from error
    return 0
