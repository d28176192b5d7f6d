"""Compiling the native library: once, and what cannot be compiled or kept is said in one line."""

from __future__ import annotations

import os
import platform
import random
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from decodekit import Decoder
from decodekit.adapters.execution.native import build, library
from decodekit.adapters.execution.native.build import build_library
from decodekit.adapters.execution.native.library import NativeLibrary
from decodekit.adapters.execution.packed import can_pack
from decodekit.adapters.llama import adapter as adapter_module
from decodekit.errors import ConfigError
from decodekit.interfaces.plan import StepPlan
from decodekit.testing import check_adapter
from tests.support.native import alone_by, native_model, needs_compiler
from tests.support.tiny import logits_after, random_prompt

pytestmark = needs_compiler

QUICK = ("-O0",)  # another library, which takes a moment


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache directory, and forget what this process has loaded."""
    monkeypatch.setenv("DECODEKIT_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "_loaded", [])
    return tmp_path


def compiler(directory: Path, script: str) -> str:
    """Return the path of a program that is to be taken for a compiler."""
    path = directory / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_it_is_compiled_once(empty: Path) -> None:
    first = build_library(QUICK)
    assert first.seconds > 0
    assert first.path.parent == empty / "native"
    made = first.path.stat()
    assert build_library(QUICK) == build.Built(first.path, 0.0)
    assert first.path.stat() == made
    assert [file.name for file in first.path.parent.iterdir()] == [first.path.name]


def test_other_flags_compilers_and_sources_are_other_files(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch = """test "$1" = --version && echo a && exit
        for last; do :; done; touch "$last" """
    monkeypatch.setenv("CXX", compiler(empty, touch))
    paths = [build_library().path, build_library(QUICK).path]
    monkeypatch.setenv("CXX", compiler(empty, touch.replace("echo a", "echo b")))
    paths.append(build_library().path)
    monkeypatch.setattr(build, "_SOURCES", (*build._SOURCES, "__init__.py"))
    paths.append(build_library().path)
    monkeypatch.setattr(build, "_processor", lambda: b"another")
    paths.append(build_library().path)
    assert len(set(paths)) == 5


def test_no_compiler(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler \(g\+\+, c\+\+ or clang\+\+"):
        build_library()
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(ConfigError, match="no compiler"):
        build_library()
    monkeypatch.setenv("CXX", "nonesuch -m64")
    with pytest.raises(ConfigError, match="no compiler 'nonesuch -m64', which CXX names"):
        build_library()


def test_a_decoder_without_a_compiler(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty))
    with pytest.raises(ConfigError, match=r"execution=native cannot run this: .*no C\+\+"):
        Decoder.from_model(native_model(), execution="native")
    other = "packed" if can_pack(torch.float32) else "eager"
    assert Decoder.from_model(native_model(), execution="auto").execution == other


def test_a_compiler_that_fails(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """test "$1" = --version && exit
        echo "pass.cpp:1: note: a remark" >&2; echo "fatal error: no omp.h" >&2; exit 1"""
    monkeypatch.setenv("CXX", compiler(empty, script))
    with pytest.raises(ConfigError, match=r"compiler failed: .*fatal error: no omp.h"):
        build_library()
    assert list((empty / "native").iterdir()) == []


def test_a_compiler_that_does_nothing_and_one_that_is_none(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(ConfigError, match="true has written nothing"):
        build_library()
    broken = compiler(empty, "")
    Path(broken).write_bytes(b"\x7fELF nothing")
    monkeypatch.setenv("CXX", broken)
    with pytest.raises(ConfigError, match=r"compiler cannot be run \(Exec format error\)"):
        build_library()


def test_a_directory_that_cannot_be_written(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty / "file").write_text("")
    monkeypatch.setenv("DECODEKIT_CACHE", str(empty / "file"))
    with pytest.raises(ConfigError, match=r"cannot be used \(.*; set DECODEKIT_CACHE"):
        build_library(QUICK)
    for name in ("x" * 5000, "~nosuchuser/cache"):
        monkeypatch.setenv("DECODEKIT_CACHE", name)
        with pytest.raises(ConfigError, match=r"cannot be used \(.*; set DECODEKIT_CACHE"):
            build_library(QUICK)


def test_a_file_that_is_no_library(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = empty / "broken.so"
    broken.write_bytes(b"nothing")
    monkeypatch.setattr(library, "build_library", lambda: build.Built(broken, 0.0))
    with pytest.raises(ConfigError, match=r"broken\.so cannot be loaded .* was removed"):
        library.native_library()
    assert not broken.exists()


NOTHING = """test "$1" = --version && exit
    for last; do :; done; echo "int nothing;" | g++ -x c++ -shared -fPIC - -o "$last" """


def cut_short(path: Path) -> None:
    """Loading it would end the process with a bus error."""
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(20_000))


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_short, emptied, random_bytes, one_bit])
def test_a_damaged_library_is_compiled_again_and_that_is_said_once(
    damage: Callable[[Path], None],
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler(empty, NOTHING))
    first = build_library()
    whole = first.path.read_bytes()
    damage(first.path)
    again = build_library()
    assert again.seconds > 0
    assert again.path.read_bytes() == whole
    assert build_library() == build.Built(again.path, 0.0)
    (record,) = caplog.records
    assert record.getMessage() == f"{first.path} is damaged; it is compiled again"


def test_processes_that_find_a_damaged_library_at_once(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(empty, NOTHING))
    first = build_library()
    whole = first.path.read_bytes()
    emptied(first.path)
    with ThreadPoolExecutor(3) as threads:
        built = [*threads.map(lambda _: build_library(), range(3))]
    assert {one.path.read_bytes() for one in built} == {whole}


def test_a_library_without_its_functions_is_refused_in_one_line(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the compiler has made of the sources."""
    monkeypatch.setenv("CXX", compiler(empty, NOTHING))
    with pytest.raises(ConfigError, match=r"cannot be loaded \(.*undefined symbol.*so it was rem"):
        library.native_library()
    assert list((empty / "native").iterdir()) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("kind", ["x86-64", "x86-64-v3", "x86-64-v3 -DDECODEKIT_OLD_GCC"])
def test_processors_with_fewer_instructions_and_older_compilers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX-512, and without any AVX: other code, which -O1 is soon done with.

    And with the shuffles of GCC before 12, which is one with those of later ones.
    """
    built = build_library((*f"-march={kind}".split(), "-O1"))
    monkeypatch.setattr(
        adapter_module, "native_library", lambda: NativeLibrary(str(built.path), built.seconds)
    )
    prompt = tuple(random_prompt(140))
    for dtype in (torch.float32, torch.bfloat16):
        model = native_model("llama", dtype)
        adapter = Decoder.from_model(model, execution="native").adapter
        check_adapter(adapter, reference=alone_by(adapter), atol=0.0)
        (logits,) = adapter.forward([StepPlan(0, prompt)], adapter.new_cache(batch=1, capacity=140))
        rounded = logits_after(model, prompt)
        exact = logits_after(model.double(), prompt)
        allowed = 1e-3 if dtype == torch.float32 else 1.5 * float((rounded - exact).abs().max())
        assert (logits[0] - exact).abs().max() < allowed
