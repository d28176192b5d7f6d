"""Which file of a checkpoint is broken: looked for once a loader has failed, which rarely says."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from decodekit.models.contents import weight_files
from decodekit.models.reporting import one_line

__all__ = ["broken_file"]

_LFS_POINTER = b"version https://git-lfs"


def broken_file(directory: Path) -> str | None:
    """Name the first file that cannot be read.

    Args:
        directory: A directory with config and weights.

    Returns:
        A clause with the file's name and what is wrong, or None if each file is sound by itself.
    """
    for file in sorted(directory.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return f"{file.name} is not readable JSON ({one_line(error, 100)})"
        if file.name == "config.json" and not isinstance(content, dict):
            return f"{file.name} is not a JSON object"
    for file in weight_files(directory):
        problem = _broken_weights(file)
        if problem is not None:
            return f"{file.name} {problem}"
    return None


def _broken_weights(file: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        return "is a Git LFS pointer, not the file itself: run `git lfs pull`"
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="numpy"):
                return None
        except (SafetensorError, OSError) as error:
            return f"is cut short or corrupt ({size:,} bytes; {one_line(error, 100)})"
    if file.suffix == ".bin" and not zipfile.is_zipfile(file):
        return f"is cut short or corrupt ({size:,} bytes)"
    if file.suffix == ".gguf" and start[:4] != b"GGUF":
        return f"is not a GGUF file ({size:,} bytes)"
    return None
