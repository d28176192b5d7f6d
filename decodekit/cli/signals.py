"""Ending on purpose: Ctrl-C and a polite request to end, which both keep what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "exit_code", "termination_raises"]


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM); handled wherever Ctrl-C is."""


@contextmanager
def termination_raises() -> Iterator[None]:
    """Let SIGTERM raise ``Terminated`` inside the block, so that it ends like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(interruption: KeyboardInterrupt) -> int:
    """Return the exit code that a shell gives: 130 after Ctrl-C, 143 after SIGTERM."""
    return 143 if isinstance(interruption, Terminated) else 130
