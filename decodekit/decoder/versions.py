"""Which versions of other packages decodekit works with, and the line about another one.

The bounds are those of ``pyproject.toml`` (a test compares the two). A lower bound is the oldest
version that ``make versions`` has run the tests with, an upper one the next major version; see
``docs/versions.md``. A package is asked for its version only, which imports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from decodekit.errors import DependencyError

__all__ = ["OPTIONAL", "REQUIRED", "Bounds", "check_optional", "check_versions"]


class Bounds(NamedTuple):
    """Versions from ``lowest`` on and before ``end``."""

    lowest: str
    end: str

    def __contains__(self, found: object) -> bool:
        """Return whether a version is within them; what follows its numbers does not count."""
        return _numbers(self.lowest) <= _numbers(str(found)) < _numbers(self.end)


REQUIRED = {
    "torch": Bounds("2.13", "3"),
    "transformers": Bounds("5.16", "6"),
    "numpy": Bounds("1.26", "3"),
    "pluggy": Bounds("1.5", "2"),
    "omegaconf": Bounds("2.3", "3"),
    "hydra-core": Bounds("1.3.2", "2"),
    "filelock": Bounds("3.12", "5"),
    "pyyaml": Bounds("6", "7"),
    "accelerate": Bounds("1.1", "2"),
    "gguf": Bounds("0.19", "1"),
    "jinja2": Bounds("3.1", "4"),
}
"""The packages without which nothing runs."""

OPTIONAL = {
    "llguidance": Bounds("1.7", "2"),
}
"""Packages that are asked for when what needs them is first used."""


@cache
def check_versions() -> None:
    """Check the versions of all packages of ``REQUIRED``, once in a process.

    Raises:
        DependencyError: One is not within its bounds. One line, with the command that installs
            another. A package that is missing, or does not tell its version, is not looked at: to
            import it says more.
    """
    _check(REQUIRED)


def check_optional(package: str) -> None:
    """Check the version of a package of ``OPTIONAL``; see ``check_versions``."""
    _check([package])


def _check(packages: Iterable[str]) -> None:
    for package in packages:
        bounds = {**REQUIRED, **OPTIONAL}[package]
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if _numbers(found) and found not in bounds:
            raise DependencyError(_said(package, bounds, found), package=package, found=found)


def _said(package: str, bounds: Bounds, found: str) -> str:
    major = int(bounds.end) - 1
    return (
        f"decodekit needs {package} {bounds.lowest} to {major}.x; {found} is installed: "
        f"pip install '{package}>={bounds.lowest},<{bounds.end}'"
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, ``(2, 13)`` for "2.13.0+cpu": without zeros at the end."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
