"""Passes that are recorded once for each shape and replayed: CUDA graphs, without what is CUDA.

A graph is a list of kernels with fixed addresses and shapes. So rows and keys are rounded up to few
sizes, inputs are copied into tensors that stay where they are, and the cache never moves. What
records and replays is a function (``Capture``); ``cuda_capture`` is the one for a GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from decodekit.errors import ConfigError

__all__ = [
    "Capture",
    "Recordings",
    "check_graphs",
    "cuda_capture",
    "rounded_keys",
]

_LEAST_KEYS = 256
_MOST_RECORDINGS = 32
_WARM_UPS = 3

Capture: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Takes a pass over tensors that stay where they are and returns what repeats it.

The result of a repetition lies in the same memory each time: the next one overwrites it."""

_Recorded = TypeVar("_Recorded")


def rounded_keys(keys: int, most: int) -> int:
    """Return 256, 512, 1,024, ... but at most ``most``, such that ``keys`` fit in."""
    return min(most, int(_LEAST_KEYS << max(0, (-(-keys // _LEAST_KEYS) - 1).bit_length())))


class Recordings(Generic[_Recorded]):
    """What was recorded over one cache, by shape; at most 32, the least recently used goes first.

    Attributes:
        made: How many were made so far.
    """

    def __init__(self) -> None:
        self.made = 0
        self._kept: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._owner: Any = None

    def get(self, owner: object, shape: Hashable, make: Callable[[], _Recorded]) -> _Recorded:
        """Return the recording of a shape, made now if there is none.

        Args:
            owner: Whose weights are in the recordings; those of another are dropped.
            shape: Equal for passes that one recording serves.
            make: Records.
        """
        if owner is not self._owner:
            self._kept.clear()
            self._owner = owner
        if shape in self._kept:
            self._kept.move_to_end(shape)
            return self._kept[shape]
        while len(self._kept) >= _MOST_RECORDINGS:
            self._kept.popitem(last=False)
        self.made += 1
        self._kept[shape] = made = make()
        return made


def check_graphs(device: torch.device | None = None) -> None:
    """Check that CUDA graphs can be recorded here.

    Args:
        device: Of the model; None if it is not loaded yet.

    Raises:
        ConfigError: They cannot.
    """
    here = torch.cuda.is_available() and (device is None or device.type == "cuda")
    if not here:
        raise ConfigError(
            "execution=graphs needs an NVIDIA GPU with the model on it (device=cuda); "
            "on a CPU use execution=packed or execution=compiled",
            key="execution",
            value="graphs",
        )


def cuda_capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Record ``run`` as a CUDA graph and return its replay; see ``Capture``.

    It runs a few times on a stream of its own first: kernels choose their algorithms and libraries
    take their memory when they are first used, which a graph cannot record.
    """
    device = run().device  # it need not be the current one
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()

    def replay() -> Tensor:
        with torch.cuda.device(device):
            graph.replay()
        return output

    return replay
