"""Pinned threads: which CPUs, which variables, and when a program is started anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from decodekit.cli.pinning import one_cpu_per_core, pinning, restart_pinned


def test_one_thread_for_each_cpu() -> None:
    assert pinning({"PATH": "/bin"}, {6, 2}) == {
        "OMP_PROC_BIND": "close",
        "OMP_PLACES": "{2},{6}",
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND"])
def test_whoever_has_set_a_variable_has_decided(name: str) -> None:
    assert pinning({name: ""}, {0, 1}) == {}


def test_no_cpus_are_nothing_to_pin_to() -> None:
    assert pinning({}, set()) == {}


def test_of_two_hardware_threads_the_first_that_is_allowed(tmp_path: Path) -> None:
    for cpu in range(8):
        directory = tmp_path / f"cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert one_cpu_per_core(range(8), topology=tmp_path) == [0, 1, 2, 3]
    assert one_cpu_per_core({1, 5, 6, 7, 3}, topology=tmp_path) == [1, 3, 6]
    assert one_cpu_per_core({9, 1, 5}, topology=tmp_path) == [1, 9]  # nothing is known of 9


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would have been executed in place of this process."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-X", "utf8", "-m", "decodekit", "job=bench"])
    for name in [name for name in os.environ if name.startswith("OMP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    return calls


def test_a_program_is_started_anew_with_all_its_arguments(started: list[tuple[Any, ...]]) -> None:
    restart_pinned()
    ((program, arguments, environment),) = started
    assert program == sys.executable
    assert arguments == [sys.executable, "-X", "utf8", "-m", "decodekit", "job=bench"]
    assert environment["OMP_PLACES"] == "{0}"
    assert {**os.environ, **environment} == environment


def test_a_program_is_started_anew_once(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    restart_pinned()
    for name, value in started.pop()[2].items():
        monkeypatch.setenv(name, value)
    restart_pinned()
    assert started == []


@pytest.mark.parametrize("missing", ["interpreter", "affinity"])
def test_where_threads_cannot_be_pinned_they_are_not(
    missing: str, started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "interpreter":
        monkeypatch.setattr(sys, "executable", "")
    else:
        monkeypatch.delattr(os, "sched_getaffinity")
    restart_pinned()
    assert started == []
