"""What is installed is what is there."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import decodekit

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    listed = re.findall(
        r'^  "(decodekit[\w.]*)",$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M
    )
    found = [
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "decodekit").rglob("__init__.py")
    ]
    assert sorted(listed) == sorted([*found, "decodekit.conf"])


def test_the_version_is_said_once() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{decodekit.__version__}"' in text


def test_settings_files_are_installed() -> None:
    installed = {
        path.name for path in resources.files("decodekit.conf").joinpath("model").iterdir()
    }
    there = {path.name for path in (ROOT / "conf" / "model").iterdir()}
    assert installed == there


def test_settings_files_name_themselves() -> None:
    for path in (ROOT / "conf" / "model").glob("*.yaml"):
        assert f"\nname: {path.stem}\n" in path.read_text(encoding="utf-8")
