"""How the model sources speak: one line at a time to stderr, and errors of one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Log", "one_line", "to_stderr"]

Log: TypeAlias = Callable[[str], None]
"""Takes one line for the user, without a line break."""


def to_stderr(message: str) -> None:
    """Write one line to stderr; stdout belongs to the generated text."""
    print(message, file=sys.stderr, flush=True)


def one_line(error: object, limit: int = 200) -> str:
    """The text of an error from another library as one line of at most ``limit`` characters.

    Args:
        error: An exception or a text.
        limit: The greatest length; a longer text ends in an ellipsis.

    Returns:
        For an exception its type and its text, else the text; line breaks become spaces.
    """
    text = " ".join(str(error).split())
    if isinstance(error, BaseException):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
