"""Models from the Hugging Face hub: the local cache first, and a quick check before any download.

The hub's own client retries for minutes where there is no network, so the hub is asked once, in a
thread with a deadline (name look-ups ignore HTTP timeouts), before the download proper is started.
"""

from __future__ import annotations

import errno
import glob
import threading
from collections.abc import Iterable
from pathlib import Path

from decodekit.errors import CheckpointError
from decodekit.models.contents import has_tokenizer, missing
from decodekit.models.own_code import check_pinned, code_files
from decodekit.models.reporting import Log, one_line, to_stderr

__all__ = ["cached_snapshot", "fetch_repo", "wanted_files"]

_DEADLINE_SECONDS = 8.0
_REQUEST_SECONDS = 5.0
_DISK_ERRORS = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS)
_KEPT_SUFFIXES = (".json", ".model", ".jinja", ".txt", ".tiktoken")


def fetch_repo(
    repo: str,
    *,
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    log: Log = to_stderr,
) -> Path:
    """Find a hub repo in the local cache, or download what is needed of it.

    Args:
        repo: The repo's id, "owner/name".
        name: The model's name, for messages.
        revision: A branch, tag or commit; None means the default branch.
        trust_remote_code: Whether the repo's own code is fetched, too; ``revision`` is a commit
            then.
        log: Receives one line before a download.

    Returns:
        The snapshot directory, with config and weights.

    Raises:
        CheckpointError: There is no network, the repo is gated, unknown or incomplete. Without a
            network this takes less than 10 seconds.
        ConfigError: Its code is trusted, and ``revision`` is no commit.
    """
    from huggingface_hub import constants, snapshot_download

    if trust_remote_code:
        check_pinned(repo, revision)
    cached = cached_snapshot(repo, revision)
    if cached is not None and _whole(cached, repo, code=trust_remote_code):
        return cached
    known = "is only in part" if cached is not None else "is not"
    absent = f"model {name!r}: {repo} {known} in the local hub cache"
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{absent} and HF_HUB_OFFLINE is set: unset it, or set model.path to a directory",
            model=name,
        )
    try:
        sizes = _ask_hub(repo, revision)
        wanted = wanted_files(sizes, code=trust_remote_code)
    except Exception as error:
        raise _explained(error, repo, name, absent) from error
    log(f"fetching {repo} from the hub ({sum(sizes[file] or 0 for file in wanted) / 1e6:,.0f} MB)")
    try:
        patterns = [glob.escape(file) for file in wanted]
        fetched = snapshot_download(repo, revision=revision, allow_patterns=patterns)
    except Exception as error:
        broken = f"model {name!r}: fetching {repo} broke off (start again to resume it)"
        raise _explained(error, repo, name, broken) from error
    lacks = missing(Path(fetched))
    if lacks is not None:
        raise CheckpointError(f"model {name!r}: {repo} on the hub lacks {lacks}", model=name)
    return Path(fetched)


def cached_snapshot(repo: str, revision: str | None = None) -> Path | None:
    """The local cache's directory for a repo, perhaps incomplete, or None; needs no network."""
    from huggingface_hub import errors, snapshot_download

    try:
        # Only config.json is asked for: whether the rest is there is judged by what a model needs,
        # not by what else the repo has (other formats of the same weights).
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=["config.json"], local_files_only=True
            )
        )
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None


def _whole(directory: Path, repo: str, *, code: bool) -> bool:
    """Whether a directory has all that a model is loaded from, its own code included if wanted."""
    if missing(directory) is not None or not has_tokenizer(directory):
        return False
    files = [file.removeprefix(f"{repo}--") for file in code_files(directory)] if code else []
    return all((directory / file).is_file() for file in files if "--" not in file)


def wanted_files(names: Iterable[str], *, code: bool = False) -> list[str]:
    """The files of a repo that a model is loaded from.

    Args:
        names: All files of the repo.
        code: Whether Python files are among them.

    Returns:
        Config, tokenizer and one format of the weights, safetensors before .bin; no duplicates such
        as ``original/*.pth`` or ``consolidated.safetensors``. No weights if there are none.
    """
    names = list(names)
    top = sorted(name for name in names if "/" not in name)
    weights = _one_format(top, "model.safetensors", ".safetensors", without="consolidated")
    weights = weights or _one_format(top, "pytorch_model.bin", ".bin", without="training_args")
    rest = [n for n in top if n.endswith(_KEPT_SUFFIXES) and not n.endswith(".index.json")]
    python = [name for name in names if code and name.endswith(".py")]
    return sorted([*weights, *rest, *python])


def _one_format(names: list[str], single: str, suffix: str, without: str) -> list[str]:
    if single in names:
        return [single]
    index = f"{single}.index.json"
    if index not in names:
        return []
    excluded = (without, "adapter_")
    return [index, *(n for n in names if n.endswith(suffix) and not n.startswith(excluded))]


def _ask_hub(repo: str, revision: str | None) -> dict[str, int | None]:
    """The repo's files and their sizes in bytes, within the deadline."""
    from huggingface_hub import HfApi

    answer: dict[str, int | None] = {}
    failure: list[Exception] = []

    def ask() -> None:
        try:
            info = HfApi().model_info(
                repo, revision=revision, files_metadata=True, timeout=_REQUEST_SECONDS
            )
            answer.update((file.rfilename, file.size) for file in info.siblings or [])
        except Exception as error:  # raised below, in the caller's thread
            failure.append(error)

    # A daemon thread: one that hangs in a name look-up must not keep the process alive.
    thread = threading.Thread(target=ask, name="decodekit-hub-check", daemon=True)
    thread.start()
    thread.join(_DEADLINE_SECONDS)
    if failure:
        raise failure[0]
    if thread.is_alive():
        raise TimeoutError(f"no answer within {_DEADLINE_SECONDS:g} seconds")
    return answer


def _explained(error: Exception, repo: str, name: str, otherwise: str) -> CheckpointError:
    """The one line for what went wrong, with the way out; ``otherwise`` is for a lost network."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo}"
    login = "`hf auth login` (older: `huggingface-cli login`)"
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    error = cause if isinstance(cause, Exception) else error
    if isinstance(error, errors.GatedRepoError):
        text = f"{repo} is gated: accept its terms at {page}, then run {login}"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{repo} has no such revision; see {page}/tree/main"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = f"no repo {repo} on the hub: check the name at {page}; if it is private, run {login}"
    elif isinstance(error, errors.HFValidationError):
        text = f"{repo!r} is neither a directory nor a hub repo (owner/name)"
    elif isinstance(error, errors.HfHubHTTPError):
        text = f"the hub refused {repo}: {one_line(error, 120)}; see {page}"
    elif isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        text = f"{repo} cannot be saved: {one_line(error, 120)}; HF_HOME sets the directory"
    else:
        reason = one_line(error, 120)
        return CheckpointError(
            f"{otherwise} and the hub cannot be reached ({reason}): "
            "connect, or set model.path to a directory with the model",
            model=name,
        )
    return CheckpointError(f"model {name!r}: {text}", model=name)
