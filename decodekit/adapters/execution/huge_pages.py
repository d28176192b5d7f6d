"""Weights and caches on huge pages: 2 MiB of memory behind one entry of the page tables.

A step reads all weights once, one after the other. With pages of 4 KiB the processor looks up an
address every 4 KiB, and what it fetches ahead ends there. Linux moves memory that is in use to huge
pages when it is asked to (``MADV_COLLAPSE``, since 6.1); nothing else changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from torch import Tensor

from decodekit.adapters.execution.release import libc

__all__ = ["ask_for_huge_pages", "use_huge_pages"]

_HUGE = 2 << 20
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE
_GAP = 64 << 10  # what lies between two allocations: their headers, and the ends of their pages


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Let memory that nobody has written to yet come in huge pages, when it is written to.

    A wish, like ``use_huge_pages``.

    Args:
        tensor: Fresh, and contiguous.
    """
    system = libc()
    if system is None or tensor.device.type != "cpu":
        return
    first = tensor.data_ptr()
    start, end = _whole_pages(first, first + tensor.nbytes)
    if start < end:
        system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _HUGEPAGE)


def use_huge_pages(spans: Iterable[tuple[int, int]]) -> int:
    """Move memory to huge pages, as far as it fills them, and return how many bytes were moved.

    It is a wish: on another system than Linux, with an older kernel, or where the system has no
    huge page to give, memory stays where it is.

    Args:
        spans: First address, and the one behind the last, of memory that is this process's own.
    """
    system = libc()
    if system is None:
        return 0
    moved = 0
    for first, last in _joined(spans):
        start, end = _whole_pages(first, last)
        if start < end:
            place, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            system.madvise(place, size, _HUGEPAGE)
            if system.madvise(place, size, _COLLAPSE) == 0:
                moved += end - start
    return moved


def _whole_pages(first: int, last: int) -> tuple[int, int]:
    return -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ``spans`` in order, those together that are next to each other."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first - joined[-1][1] <= _GAP:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined
