"""Directories that are built once and kept: whole or absent, whatever is killed in between.

A built directory ends with a manifest of its files' sizes. It is made beside its final place under
a lock and moved there by a rename, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from decodekit.errors import CheckpointError
from decodekit.models.cache_dir import cache_dir
from decodekit.models.reporting import Log, one_line, to_stderr

__all__ = ["MANIFEST", "cached_directory", "flaw"]

MANIFEST = "decodekit.json"


def flaw(directory: Path, key: str) -> str | None:
    """Say why a built directory cannot be used, without reading its files.

    Args:
        directory: The directory; it may not exist.
        key: What it must have been built from.

    Returns:
        One clause, or None if all files of the manifest have their sizes.
    """
    manifest = directory / MANIFEST
    try:
        sealed = json.loads(manifest.read_text(encoding="utf-8"))
        if sealed["key"] != key:
            return "it was built from something else"
        sizes = {str(name): int(size) for name, size in sealed["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} is not readable"
    for name, size in sizes.items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
    return None


def cached_directory(
    name: str, *, key: str, build: Callable[[Path, Path], None], log: Log = to_stderr
) -> Path:
    """A directory of the cache, built now if it is not there whole.

    Any number of processes may ask at once: one builds, the others wait and use its result.

    Args:
        name: The directory's name under `cache_dir`.
        key: What it is built from; a directory built from another key is built again.
        build: Called with the directory to fill and an empty one for temporary files.
        log: Receives one line if this waits for another process or builds again.

    Returns:
        The directory; all its files are there with their full size.

    Raises:
        CheckpointError: The cache cannot be written, or what ``build`` raised.
    """
    final = cache_dir() / name
    if flaw(final, key) is None:
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _alone(final, log):
            problem = flaw(final, key)
            if problem is None:  # another process built it while this one waited
                return final
            if final.exists():
                log(f"{final} cannot be used ({problem}): building it again")
            with _workspace(final) as workspace:
                (workspace / "temporary").mkdir()
                (workspace / "new").mkdir()
                build(workspace / "new", workspace / "temporary")
                _seal(workspace / "new", key)
                if final.exists():
                    final.replace(workspace / "old")
                (workspace / "new").replace(final)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"model {name!r}: cannot write to {final.parent} ({one_line(error)}); "
            "set DECODEKIT_CACHE to a directory with room for it",
            model=name,
        ) from error
    return final


@contextmanager
def _alone(final: Path, log: Log) -> Iterator[None]:
    lock = FileLock(final.with_name(f"{final.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log(f"waiting for another process that prepares {final.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _workspace(final: Path) -> Iterator[Path]:
    # The lock is held, so what is found here was left behind by a process that was killed.
    for left in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(left)
    workspace = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    workspace.mkdir()
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _seal(directory: Path, key: str) -> None:
    """Write the manifest, and have all files on the disk before the rename makes them visible."""
    manifest = directory / MANIFEST
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    sizes = {file.relative_to(directory).as_posix(): file.stat().st_size for file in files}
    manifest.write_text(json.dumps({"key": key, "files": sizes}, indent=1), encoding="utf-8")
    for file in (*files, manifest):
        shutil.copymode(manifest, file)  # some writers make files that only their owner can read
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
