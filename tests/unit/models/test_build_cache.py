"""A built directory is whole or absent: two at once, a kill, a cut, a full disk."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from decodekit.errors import CheckpointError
from decodekit.models.build_cache import MANIFEST, cached_directory, flaw
from decodekit.models.cache_dir import cache_dir

# Builds slowly in a process of its own; the arguments are the seconds and a file to append to.
SLOW = """
import sys, time
from pathlib import Path
from decodekit.models.build_cache import cached_directory

def build(output, temporary):
    with open(sys.argv[2], "a") as record:
        record.write("built\\n")
    (output / "first").write_text("1")
    (temporary / "scratch").write_text("x")
    time.sleep(float(sys.argv[1]))
    (output / "second").write_text("22")

print(cached_directory("model", key="k", build=build))
"""


def start(seconds: float, record: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, str(seconds), str(record)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def build(output: Path, temporary: Path) -> None:
    assert list(output.iterdir()) == list(temporary.iterdir()) == []
    (temporary / "scratch").write_text("x")
    (output / "first").write_text("1")
    (output / "sub").mkdir()
    (output / "sub" / "second").write_text("22")


def no_build(output: Path, temporary: Path) -> None:
    raise AssertionError("the cache was not used")


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ("/own", "/shared", "/own"),
        ("~/own", None, "/home/me/own"),
        (None, "/shared", "/shared/decodekit"),
        ("", "", "/home/me/.cache/decodekit"),
        (None, None, "/home/me/.cache/decodekit"),
    ],
)
def test_cache_dir(
    monkeypatch: pytest.MonkeyPatch, own: str | None, shared: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("DECODEKIT_CACHE", own), ("XDG_CACHE_HOME", shared)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_built_once(own_caches: Path, said: list[str]) -> None:
    found = cached_directory("model", key="k", build=build, log=said.append)
    assert found == own_caches / "model"
    assert (found / "sub" / "second").read_text() == "22"
    assert cached_directory("model", key="k", build=no_build, log=said.append) == found
    assert sorted(file.name for file in own_caches.iterdir()) == ["model", "model.lock"]
    assert said == []


def test_the_files_can_be_read_by_whoever_can_read_the_manifest(own_caches: Path) -> None:
    def private(output: Path, temporary: Path) -> None:
        (output / "weights").touch(mode=0o600)

    found = cached_directory("model", key="k", build=private)
    modes = {stat.S_IMODE((found / name).stat().st_mode) for name in ("weights", MANIFEST)}
    assert len(modes) == 1


def test_a_file_cut_short_is_built_again_and_said(own_caches: Path, said: list[str]) -> None:
    found = cached_directory("model", key="k", build=build)
    (found / "sub" / "second").write_text("2")
    cached_directory("model", key="k", build=build, log=said.append)
    reason = "sub/second has 1 bytes instead of 2"
    assert said == [f"{found} cannot be used ({reason}): building it again"]
    assert (found / "sub" / "second").read_text() == "22"
    assert sorted(file.name for file in own_caches.iterdir()) == ["model", "model.lock"]


def test_flaws(tmp_path: Path) -> None:
    manifest = tmp_path / MANIFEST
    assert flaw(tmp_path / "none", "k") == "it has no decodekit.json"
    for content in ("{", "[]", "{}", '{"key": "k", "files": []}', "\x00"):
        manifest.write_text(content)
        assert flaw(tmp_path, "k") == "its decodekit.json is not readable"
    manifest.write_text(json.dumps({"key": "k", "files": {"a": 1}}))
    assert flaw(tmp_path, "other") == "it was built from something else"
    assert flaw(tmp_path, "k") == "a is missing"
    (tmp_path / "a").write_text("1")
    assert flaw(tmp_path, "k") is None


def test_a_build_that_fails_leaves_nothing(own_caches: Path) -> None:
    def fails(output: Path, temporary: Path) -> None:
        build(output, temporary)
        raise CheckpointError("no network")

    def interrupted(output: Path, temporary: Path) -> None:
        build(output, temporary)
        raise KeyboardInterrupt

    with pytest.raises(CheckpointError, match=r"^no network$"):
        cached_directory("model", key="k", build=fails)
    with pytest.raises(KeyboardInterrupt):
        cached_directory("model", key="k", build=interrupted)
    assert [file.name for file in own_caches.iterdir()] == ["model.lock"]
    cached_directory("model", key="k", build=build)  # the lock was given back


def test_a_disk_error_names_the_setting(own_caches: Path) -> None:
    def full(output: Path, temporary: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device.*set DECODEKIT_CACHE") as e:
        cached_directory("model", key="k", build=full)
    assert "\n" not in str(e.value)
    own_caches.joinpath("model.lock").unlink()
    own_caches.rmdir()
    own_caches.write_text("a file where the cache should be")
    with pytest.raises(CheckpointError, match=r"cannot write to .*set DECODEKIT_CACHE"):
        cached_directory("model", key="k", build=no_build)


def test_two_processes_at_once_build_once(own_caches: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    first = start(6, record)  # long enough for the others to begin on a busy machine
    wait_for(record)
    others = [start(0.5, record) for _ in range(2)]
    results = [process.communicate(timeout=30) for process in (first, *others)]
    assert [out.strip() for out, _ in results] == [str(own_caches / "model")] * 3
    waiting = "waiting for another process that prepares model\n"
    assert [err for _, err in results] == ["", waiting, waiting]
    assert record.read_text() == "built\n"
    assert flaw(own_caches / "model", "k") is None


def test_two_threads_at_once_build_once(own_caches: Path, said: list[str]) -> None:
    building, waiting = threading.Event(), threading.Event()
    builds: list[Path] = []

    def slow(output: Path, temporary: Path) -> None:
        building.set()
        assert waiting.wait(10)
        builds.append(output)

    def log(message: str) -> None:
        said.append(message)
        waiting.set()

    first = threading.Thread(target=lambda: cached_directory("model", key="k", build=slow))
    first.start()
    assert building.wait(10)
    found = cached_directory("model", key="k", build=no_build, log=log)
    first.join(10)
    assert said == ["waiting for another process that prepares model"]
    assert found == own_caches / "model"
    assert len(builds) == 1


def test_a_kill_in_the_middle_leaves_nothing_that_counts(
    own_caches: Path, tmp_path: Path, said: list[str]
) -> None:
    record = tmp_path / "record"
    process = start(60, record)
    wait_for(record)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert list(own_caches.glob(".model.*.tmp")), "the kill came too late to mean anything"
    assert not (own_caches / "model").exists()
    cached_directory("model", key="k", build=build, log=said.append)
    assert sorted(file.name for file in own_caches.iterdir()) == ["model", "model.lock"]
    assert said == []
