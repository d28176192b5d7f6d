"""Where what was made once is kept: converted models, compiled code."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """Return the directory of what is made once; it may not exist yet.

    Returns:
        ``$DECODEKIT_CACHE``, else ``$XDG_CACHE_HOME/decodekit``, else ``~/.cache/decodekit``.
    """
    own = os.environ.get("DECODEKIT_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "decodekit"
