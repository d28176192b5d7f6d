"""Memory that nobody needs any more goes back to the system at once.

A weight that has been copied into another layout leaves two kinds of waste. If it was mapped from a
file, its pages count as the process's memory until the last tensor of the file is gone. If it was
allocated, the C library may keep what was freed. Neither is let go by dropping the tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from array import array
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["libc", "release_mapped", "trim_heap"]

_DONTNEED = 4  # MADV_DONTNEED, which Python's mmap module has for mappings of its own only
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61  # Linux, admin-guide/mm/pagemap


@cache
def libc() -> Any:
    """Return the C library on Linux, else None."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def trim_heap() -> None:
    """Let the C library return freed memory to the system, where it is one that can (glibc)."""
    trim = getattr(libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_mapped(tensor: Tensor) -> bool:
    """Take the pages of a tensor that is mapped from a file out of memory; return whether.

    Its values stay what they are: whoever reads them again reads the file again. Nothing is done,
    and nothing has to be, where the tensor is no mapping of a file, where one of its pages was
    written to, or on another system than Linux.

    Args:
        tensor: Contiguous, on a CPU.
    """
    page = mmap.PAGESIZE
    # Only pages that belong to the tensor alone.
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if libc() is None or start >= end or not tensor.is_contiguous():
        return False
    try:
        if not _of_file(start, end) or _written(start // page, end // page):
            return False
    except OSError:
        return False
    return int(libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)) == 0


def _of_file(start: int, end: int) -> bool:
    """Return whether these addresses lie in one mapping of a file."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        span, _mode, _offset, _device, inode, *_ = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in span.split("-"))
        if first <= start and end <= last:
            return inode != "0"
    return False


def _written(first: int, last: int) -> bool:
    """Return whether one of these pages is a private copy: the file does not have what is in it."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        flags = array("Q", pages.read(8 * (last - first)))
    return len(flags) != last - first or any(
        flag & _SWAPPED or (flag & _PRESENT and not flag & _OF_FILE) for flag in flags
    )
