"""Code that a checkpoint brings along: it runs with consent for that checkpoint, or not at all.

Where a config's ``auto_map`` names Python files, ``transformers`` imports them if it is told to
trust them; told nothing, it asks on standard output and takes standard input for the answer. Here
consent is a setting, and it covers one directory, or one commit of a repo.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decodekit.errors import CheckpointError, ConfigError, ModelSupportError

__all__ = [
    "check_attention",
    "check_own_code",
    "check_pinned",
    "code_files",
    "named_code",
    "refusal",
    "snapshot_of",
    "unused_tokenizer_code",
]

SETTING = "model.trust_remote_code"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REFERENCE = re.compile(r"(?:(?P<repo>.+)--)?(?P<module>[\w-]+(?:/[\w-]+)*)\.(?P<name>\w+)")
_LOADED = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")


def named_code(directory: Path) -> dict[str, list[str]]:
    """What the configs of a directory name as code to load it with.

    Args:
        directory: An existing directory; a file that cannot be read counts as naming nothing.

    Returns:
        For each of the auto classes that are loaded here its references: ``module.Class``, with
        ``owner/name--`` before it where the code lies in another repo.
    """
    found: dict[str, list[str]] = {}
    for name in ("config.json", "tokenizer_config.json"):
        content = _json(directory / name)
        named = content.get("auto_map") if isinstance(content, dict) else None
        if isinstance(named, list):  # an old form of tokenizers
            named = {"AutoTokenizer": named}
        if not isinstance(named, dict):
            continue
        for auto_class in _LOADED:
            given = named.get(auto_class)
            for one in given if isinstance(given, list) else [given]:
                if isinstance(one, str) and one not in found.setdefault(auto_class, []):
                    found[auto_class].append(one)
    return {auto_class: references for auto_class, references in found.items() if references}


def code_files(directory: Path) -> list[str]:
    """The names of the files that ``named_code`` speaks of, as a user would look for them."""
    references = [one for named in named_code(directory).values() for one in named]
    return sorted({f"{one.rpartition('.')[0]}.py" for one in references})


def check_own_code(directory: Path) -> None:
    """Check, before anything of it runs, that consent to a directory covers the code it names.

    Raises:
        ConfigError: Some of it lies elsewhere: in another repo, or outside the directory.
        CheckpointError: A file is missing.
    """
    snapshot = snapshot_of(directory)
    own_repo = snapshot[0] if snapshot is not None else None
    for references in named_code(directory).values():
        for reference in references:
            match = _REFERENCE.fullmatch(reference)
            if match is None or match["repo"] not in (None, own_repo):
                elsewhere = match["repo"] if match is not None else reference
                raise ConfigError(
                    f"{directory} names code that lies elsewhere ({elsewhere}), and {SETTING} "
                    "covers its own files only: copy the code into a directory with the "
                    "checkpoint, and name it in auto_map without what stands before --",
                    key=SETTING,
                )
            file = f"{match['module']}.py"
            if not (directory / file).is_file():
                raise CheckpointError(f"{directory} lacks {file}, the code that its config names")


def refusal(directory: Path, *, trusted: bool) -> ConfigError | ModelSupportError:
    """The error for a directory that cannot be loaded without code that was not run.

    Args:
        directory: The directory.
        trusted: Whether there is consent, which then did not cover that code.
    """
    if trusted:
        reason = "a part of its config names further code, which is never run"
        return ModelSupportError(f"{directory}: {reason}", reason=reason)
    files = ", ".join(code_files(directory)) or "named in a part of its config.json"
    setting, place = f"{SETTING}=true", ""
    snapshot = snapshot_of(directory)
    if snapshot is not None:
        from huggingface_hub import constants

        repo, commit = snapshot
        setting += f" and model.revision={commit}"
        place = f" at {constants.ENDPOINT}/{repo}/tree/{commit}"
    return ConfigError(
        f"{directory} needs code of its own ({files}), which was not run: read it{place}, and set "
        f"{setting} to run it",
        key=SETTING,
        value=False,
    )


def check_pinned(repo: str, revision: str | None) -> None:
    """Check that consent to a repo's code is consent to one commit.

    Raises:
        ConfigError: ``revision`` is no commit; a branch or a tag may hold other code tomorrow.
    """
    if revision is None or not _COMMIT.fullmatch(revision):
        from huggingface_hub import constants

        raise ConfigError(
            f"{SETTING}=true needs model.revision=COMMIT beside it, 40 hexadecimal digits, since "
            f"the code of {repo} may change: read it and take the commit from "
            f"{constants.ENDPOINT}/{repo}/commits/main",
            key="model.revision",
            value=revision,
        )


def snapshot_of(directory: Path) -> tuple[str, str] | None:
    """The repo and the commit that a directory is the hub cache's snapshot of, else None."""
    resolved = directory.absolute()
    kind, *parts = resolved.parent.parent.name.split("--")
    inside = resolved.parent.name == "snapshots" and kind == "models" and parts
    return ("/".join(parts), resolved.name) if inside and _COMMIT.fullmatch(resolved.name) else None


def check_attention(directory: Path) -> None:
    """Check that no config names an attention kernel on the hub: that is code, too.

    Raises:
        ModelSupportError: One does.
    """
    for key, value in _settings(_json(directory / "config.json")):
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            reason = f"its config.json asks for code from elsewhere ({key}: {value})"
            raise ModelSupportError(
                f"{directory}: {reason}, which is never run; take {key} out of it", reason=reason
            )


def unused_tokenizer_code(directory: Path, tokenizer: object) -> str | None:
    """The file of a tokenizer's own code, if a general one was loaded in its place; else None."""
    for reference in named_code(directory).get("AutoTokenizer", []):
        module, _, name = reference.rpartition(".")
        if type(tokenizer).__name__.removesuffix("Fast") == name.removesuffix("Fast"):
            return None
        return f"{module}.py"
    return None


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever loads it says what is wrong


def _settings(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a config and of the configs in it."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield key, value
            yield from _settings(value)
