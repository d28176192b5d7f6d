"""One thread at a time where a model must be whole: its own forward, or one with parts replaced."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["lock_of"]

_locks: WeakKeyDictionary[Any, AbstractContextManager[Any]] = WeakKeyDictionary()
_guard = Lock()


def lock_of(model: Any) -> AbstractContextManager[Any]:
    """Return the lock, reentrant, under which parts of ``model`` are replaced for a pass.

    Its own forward pass is run under it, too: meanwhile another thread may have put in our
    attention.
    """
    with _guard:
        return _locks.setdefault(model, RLock())
