"""Timing of Triton kernels on a GPU. Importing this needs triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.runtime.errors import OutOfResources, PTXASError
from triton.testing import do_bench

__all__ = ["REFUSALS", "milliseconds_of"]

REFUSALS: tuple[type[Exception], ...] = (OutOfResources, PTXASError, torch.OutOfMemoryError)
"""What is raised by a kernel that does not fit a GPU, or by timing where no memory is left."""


def milliseconds_of(run: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU, without compiling, its second-level cache cold.

    Takes about a twentieth of a second, and a quarter of a GiB of the GPU's memory meanwhile.
    """
    return float(do_bench(run, warmup=5, rep=20, return_mode="median"))
