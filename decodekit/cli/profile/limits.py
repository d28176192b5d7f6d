"""How fast this machine reads memory and multiplies, measured with a few small kernels.

*Reading*: a block of memory as large as what a step reads (from 1 MiB to 512 MiB), so that it comes
from where a step's weights come from, a cache or the memory; it was written first, so that its
pages are there. Two kernels: torch's sum of it, and its product with a vector, both in float32.

*Arithmetic*: the product of two square matrices in the model's dtype, filled with random numbers,
1024 wide on a CPU and 8192 on a GPU; on a CPU that of a packed linear layer as well, where they
work. An operation is one multiplication or one addition.

Each kernel is run twice without being timed and then five times; the fastest time counts, and of
the kernels the fastest. A limit should be what the machine can do, not what it did on average.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from decodekit.adapters.execution.packed import PackedLinear, can_pack

__all__ = ["Rates", "measure_rates", "synchronize"]

_WARMUP, _TIMED = 2, 5
_WIDTH = 4096  # of the matrix that is read


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates by kernel.

    Attributes:
        read: Bytes per second.
        arithmetic: Operations per second.
    """

    read: dict[str, float]
    arithmetic: dict[str, float]

    @property
    def bytes_per_second(self) -> float:
        """The rate of the fastest kernel that reads."""
        return max(self.read.values())

    @property
    def operations_per_second(self) -> float:
        """The rate of the fastest kernel that multiplies."""
        return max(self.arithmetic.values())

    def best(self, other: Rates) -> Rates:
        """Return for each kernel the better rate of two measurements of the same machine."""
        return Rates(
            {name: max(rate, other.read[name]) for name, rate in self.read.items()},
            {name: max(rate, other.arithmetic[name]) for name, rate in self.arithmetic.items()},
        )


def synchronize() -> None:
    """Wait until a GPU, if there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.inference_mode()
def measure_rates(size: int, *, dtype: torch.dtype, device: torch.device) -> Rates:
    """Measure the machine.

    Args:
        size: Bytes that a step reads.
        dtype: Of the model.
        device: Of the model.
    """
    return Rates(_reading(size, device), _multiplying(dtype, device))


def _reading(size: int, device: torch.device) -> dict[str, float]:
    rows = min(max(size, 2**20), 2**29) // (4 * _WIDTH)
    block = torch.ones((rows, _WIDTH), device=device)
    vector = torch.ones(_WIDTH, device=device)
    amount = 4 * block.numel()
    return {
        "sum": amount / _fastest(block.sum),
        "matrix times vector": amount / _fastest(lambda: torch.mv(block, vector)),
    }


def _multiplying(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    width = 1024 if device.type == "cpu" else 8192
    generator = torch.Generator(device).manual_seed(0)  # the global one is left alone
    left, right = (
        torch.randn(width, width, generator=generator, dtype=dtype, device=device) for _ in range(2)
    )
    amount = 2 * width**3
    rates = {"matrix product": amount / _fastest(lambda: left @ right)}
    if device.type == "cpu" and can_pack(dtype):
        linear = nn.Linear(width, width, bias=False, device="meta")
        linear.weight = nn.Parameter(right, requires_grad=False)
        packed = PackedLinear(linear)
        rates["packed linear layer"] = amount / _fastest(lambda: packed(left))
    return rates


def _fastest(run: Callable[[], object]) -> float:
    """Return the least time of a call in seconds."""
    seconds = []
    for number in range(_WARMUP + _TIMED):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        if number >= _WARMUP:
            seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)
