"""What a checkpoint directory holds and what it lacks, told from names alone: no file is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["has_tokenizer", "missing", "missing_of_gguf", "single_gguf", "weight_files"]

# transformers looks for these names and no others, in this order; each also in a sharded form.
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_GGUF_SHARD = re.compile(r"-\d+-of-(?P<count>\d+)")


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The files that the weights would be read from.

    Args:
        directory: An existing directory.

    Returns:
        The preferred kind only (safetensors, then .bin, then GGUF). Shards are those that the
        index names, so a path may not exist. Empty if there are no weights.

    Raises:
        ValueError: A shard index is not readable; the text names the file.
    """
    for single in _SINGLE_FILES:
        if (directory / single).is_file():
            return (directory / single,)
        index = directory / f"{single}.index.json"
        if index.is_file():
            return tuple(directory / name for name in _shards(index))
    return tuple(sorted(directory.glob("*.gguf")))


def _shards(index: Path) -> list[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a readable {index.name}") from error


def single_gguf(directory: Path) -> Path | None:
    """The GGUF file that stands for the whole model, or None if the weights are of another kind."""
    files = weight_files(directory)
    return files[0] if len(files) == 1 and files[0].suffix == ".gguf" else None


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer can be built from the directory; a GGUF carries its own."""
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return True
    return any(directory.glob("*.tiktoken")) or single_gguf(directory) is not None


def missing(directory: Path) -> str | None:
    """Say what an existing directory lacks to be loaded as a model.

    Args:
        directory: An existing directory.

    Returns:
        The end of a sentence that starts with "lacks", or None if config and weights are there.
        A tokenizer is not asked for: see `has_tokenizer`.
    """
    try:
        files = weight_files(directory)
    except ValueError as error:
        return str(error)
    gguf = [file for file in files if file.suffix == ".gguf"]
    if gguf and (shards := missing_of_gguf(gguf[0])) is not None:
        return shards
    if len(gguf) > 1:
        return f"a single .gguf file: it has {len(gguf)}, give the path of one ({gguf[0].name})"
    lacks: list[str] = []
    if not gguf and not (directory / "config.json").is_file():
        lacks.append("config.json")
    if not files:
        lacks.append("weights (model.safetensors, pytorch_model.bin, their shards, or one .gguf)")
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        lacks.append(absent[0] + (f" and {len(absent) - 1} more shards" if absent[1:] else ""))
    return " and ".join(lacks) or None


def missing_of_gguf(file: Path) -> str | None:
    """Say what a GGUF file lacks to be a whole model: the other files of a split; told by its name.

    Returns:
        The end of a sentence that starts with "lacks", or None.
    """
    split = _GGUF_SHARD.search(file.stem)
    if split is None or int(split["count"]) == 1:
        return None
    count = int(split["count"])
    return (
        f"the rest of the model: {file.name} is one of {count}, which transformers cannot read; "
        "join them with `llama-gguf-split --merge`"
    )
