"""Compiles the C++ sources beside this file, once for a machine, and keeps the result.

What the processor has decides which instructions are used, so code is compiled where it runs. The
compiler is ``$CXX``, else the first of ``g++``, ``c++`` and ``clang++`` on the path: g++ first,
because its OpenMP is the one that torch has its threads from.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from decodekit.errors import ConfigError, shortened
from decodekit.models.cache_dir import cache_dir

__all__ = ["Built", "build_library"]

_SOURCES = (
    "library.cpp",
    "pass.h",
    "model.h",
    "view.h",
    "attention.h",
    "linear.h",
    "largest.h",
    "vectors.h",
)

_LOG = logging.getLogger("decodekit.native")

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-Wno-psabi")


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled library.

    Attributes:
        path: The file.
        seconds: How long the compiler took just now; 0 if the file was there.
    """

    path: Path
    seconds: float


def build_library(flags: Sequence[str] | None = None) -> Built:
    """Return the library, compiled now if this machine has none of these sources and flags.

    Processes that ask at once may all compile; each sees a whole file. A file's name ends with the
    digest of its content; one that has another content by now, since a disk or a crash has damaged
    it, is removed and compiled again, which is said once.

    Args:
        flags: What the compiler is told of the processor; None for all that this one has.

    Raises:
        ConfigError: There is no compiler, it fails, or the result cannot be kept.
    """
    if sys.platform != "linux":
        raise _unavailable(f"it is made for Linux, not {sys.platform}")
    compiler = _compiler()
    if flags is None:
        x86 = platform.machine() in ("x86_64", "AMD64")
        flags = ("-march=native",) if x86 else ("-mcpu=native",)
    arguments = [*compiler, *_FLAGS, *flags]
    sources = files(__package__)
    texts = [sources.joinpath(name).read_bytes() for name in _SOURCES]
    key = hashlib.sha256(b"\0".join([*texts, repr((arguments, _version(compiler))).encode()]))
    key.update(_processor())
    start = time.perf_counter()
    try:
        place, name = cache_dir() / "native", key.hexdigest()[:16]
        kept = _whole_file(place, name)
        if kept is not None:
            return Built(kept, 0.0)
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".building-") as directory:
            for source, text in zip(_SOURCES, texts, strict=True):
                Path(directory, source).write_bytes(text)
            made = Path(directory, "made.so")
            _run([*arguments, str(Path(directory, _SOURCES[0])), "-o", str(made)])
            if not made.is_file():
                raise _unavailable(f"{compiler[0]} has written nothing")
            final = place / f"{name}-{_digest(made)}.so"
            os.replace(made, final)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise _unavailable(
            f"its directory cannot be used ({error}); set DECODEKIT_CACHE to one that can be "
            "written"
        ) from error
    return Built(final, time.perf_counter() - start)


def _whole_file(place: Path, name: str) -> Path | None:
    """Return the library ``name`` in a directory, if it is there and has its content still.

    A damaged one must not be loaded to find out: one that was cut short ends the process.
    """
    for path in sorted(place.glob(f"{name}-*.so")):
        try:
            if path.stem.removeprefix(f"{name}-") == _digest(path):
                return path
            _LOG.warning("%s is damaged; it is compiled again", path)
            path.unlink()
        except FileNotFoundError:  # another process has removed it
            continue
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        with suppress(ValueError):  # a quotation that does not end
            command = shlex.split(named)
            if command and shutil.which(command[0]):
                return command
        raise _unavailable(f"there is no compiler {named!r}, which CXX names")
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise _unavailable("there is no C++ compiler (g++, c++ or clang++; or name one in CXX)")


def _version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"])


def _processor() -> bytes:
    """Return what tells this kind of processor from others that may share the directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor().encode()
    first = lines[: lines.index("")] if "" in lines else lines
    kinds = ("model name", "model", "flags", "features", "cpu part", "cpu variant")
    return "\n".join(line for line in first if line.lower().startswith(kinds)).encode()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise _unavailable(f"{command[0]} cannot be run ({error.strerror})") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = next((line for line in lines if "error" in line.lower()), " ".join(lines[:1]))
        raise _unavailable(f"{command[0]} failed: {shortened(said)}")
    return done.stdout


def _unavailable(reason: str) -> ConfigError:
    return ConfigError(
        f"the library cannot be compiled here: {reason}",
        key="execution",
        value="native",
    )
