"""Passes are computed in the model's own dtypes, whatever ``torch.autocast`` is around the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["outside_autocast"]

_KINDS = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Switch ``torch.autocast`` off in this block, on every kind of device where it is on.

    It would cast what goes into some operations and not into others: packed weights would meet
    states of another dtype, and tokens would depend on what is around the call.
    """
    on = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    with ExitStack() as off:
        for kind in on:
            off.enter_context(torch.autocast(kind, enabled=False))
        yield
