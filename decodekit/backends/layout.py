"""How the states that a kernel is handed lie in memory."""

from __future__ import annotations

from torch import Tensor

__all__ = ["rows_in_one_piece"]


def rows_in_one_piece(states: Tensor) -> Tensor:
    """Return ``states`` [..., D] with a last stride of 1: nearly always as they are.

    Kernels that take strides for all other dimensions assume that one, and some do not check it.
    """
    return states if states.stride(-1) == 1 else states.contiguous()
