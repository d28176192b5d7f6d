"""Files that a job writes, looked at before the work that fills them."""

from __future__ import annotations

import os
from pathlib import Path

from decodekit.errors import ConfigError

__all__ = ["check_writable"]


def check_writable(path: str, *, key: str) -> None:
    """Check that a file can be written; nothing is written yet.

    Args:
        path: The file; it may be there already.
        key: The setting that names it.

    Raises:
        ConfigError: It cannot, with the reason.
    """
    file = Path(path)
    reason = None
    try:
        if file.is_dir():
            reason = "it is a directory"
        elif not file.parent.is_dir():
            reason = "its directory does not exist"
        elif not os.access(file if file.exists() else file.parent, os.W_OK):
            reason = "permission denied"
    except (OSError, ValueError) as error:  # too long a name; a name with a null byte
        reason = getattr(error, "strerror", None) or "it is no name of a file"
    if reason is not None:
        raise ConfigError(f"cannot write {path}: {reason}", key=key)
