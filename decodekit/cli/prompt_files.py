"""Files of prompts: JSON lines, in any of the forms that public benchmarks come in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from decodekit.decoder.prompt import Prompt
from decodekit.errors import ConfigError, GenerationError, shortened

__all__ = ["Encoder", "FilePrompt", "encoded", "read_prompts"]


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt of a file.

    Attributes:
        id: Its ``id``, or its line number.
        category: Its ``task`` or ``category``; prompts are reported by it.
        prompt: What ``Decoder.generate`` takes.
        chat: Whether text goes through the chat template.
    """

    id: str
    category: str
    prompt: Prompt
    chat: bool


def read_prompts(path: str, *, limit: int = 0, key: str) -> list[FilePrompt]:
    """Read prompts from JSON lines.

    A line holds ``input_ids`` (token ids), ``turns`` (texts of the user, the first is taken),
    ``messages`` (a chat) or ``prompt`` (text); ``kind: completion`` keeps text out of the template.

    Args:
        path: The file.
        limit: Prompts taken of each category, the first ones; 0 takes all.
        key: The setting that names the file, for error messages.

    Raises:
        ConfigError: The file cannot be read, or a line is not a prompt.
    """
    try:
        # Not splitlines: a JSON line may hold other characters that end lines.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the prompts in {path}: {reason}", key=key) from error
    taken: dict[str, int] = {}
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, path, number, key)
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if not limit or taken[prompt.category] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompts", key=key)
    return prompts


class Encoder(Protocol):
    """What turns a prompt into token ids: a ``Decoder``."""

    def encode(self, prompt: Prompt, *, chat: bool | None = None) -> list[int]:
        """Return the token ids of a prompt."""
        ...


def encoded(prompt: FilePrompt, decoder: Encoder, *, key: str) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        prompt: The prompt.
        decoder: What it is for.
        key: The setting that names the file, for error messages.

    Raises:
        ConfigError: It cannot be run; the message says which one it is.
    """
    try:
        return decoder.encode(prompt.prompt, chat=None if prompt.chat else False)
    except GenerationError as error:
        raise ConfigError(f"prompt {prompt.id!r}: {error}", key=key) from error


def _parse(line: str, path: str, number: int, key: str) -> FilePrompt:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"line {number} of {path} is not JSON: {error}", key=key) from error
    try:
        kind = record.get("kind", "chat")
        if kind not in ("chat", "completion"):
            raise ConfigError(
                f"line {number} of {path}: kind must be chat or completion, not {shortened(kind)}",
                key=key,
            )
        prompt: Prompt
        if "input_ids" in record or "messages" in record:
            prompt = record.get("input_ids", record.get("messages"))
            expected: type = list
        else:
            prompt = _first(record["turns"]) if "turns" in record else record["prompt"]
            expected = str
        if not isinstance(prompt, expected):
            raise TypeError(f"a prompt must be a {expected.__name__}")
    except (KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"line {number} of {path} needs input_ids or messages (lists), turns (a list of texts) "
            "or prompt (a text)",
            key=key,
        ) from error
    category = str(record.get("task") or record.get("category") or "all")
    return FilePrompt(str(record.get("id", number)), category, prompt, kind == "chat")


def _first(turns: Any) -> Any:
    if not isinstance(turns, list) or not turns:
        raise TypeError("turns must be a list of texts")
    return turns[0]
