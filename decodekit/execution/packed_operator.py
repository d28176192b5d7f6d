"""The private torch operators for weights packed by oneDNN: used here and nowhere else.

Torch's compiler uses them when it freezes a model. Whoever calls them has tried them before, see
``packed.can_pack``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FEWEST_ROWS", "pack_weight", "packed_linear", "run_packed", "span_of"]

FEWEST_ROWS = 4
"""Rows of a call at least: fewer are filled up, so whoever has some to spare may do it before."""


def run_packed(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``states @ weight.T + bias`` [..., out] for states [..., in]; runs four rows at least.

    For a row that is alone oneDNN adds up in another order than for two or more, and its result
    would depend on whether there are others. And on the machine that was measured four rows take
    less time than one, two or three.
    """
    width = states.shape[-1]
    rows = states.numel() // width
    if 0 < rows < FEWEST_ROWS:
        few = states.reshape(rows, width)
        more = few[-1:].expand(FEWEST_ROWS - rows, -1)
        filled = run_packed(torch.cat([few, more]), packed, bias)
        return filled[:rows].view(*states.shape[:-1], filled.shape[-1])
    output: Tensor = torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
    return output


def packed_linear(states: Tensor, packed: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return ``states @ weight.T + bias``, in a form that torch can compile.

    Torch's compiler takes the private operator only with weights that are constants of the compiled
    code, one copy of it per layer. Behind an operator of our own a packed weight is an argument.

    Args:
        states: [..., in].
        packed: Of ``pack_weight``.
        bias: [out], or None.
        out: The number of outputs.
    """
    if not torch.compiler.is_compiling():
        return run_packed(states, packed, bias)
    output: Tensor = torch.ops.decodekit.packed_linear(states, packed, bias, out)
    return output


def _real(states: Tensor, packed: Tensor, bias: Tensor | None, out: int) -> Tensor:
    return run_packed(states, packed, bias)


def _fake(states: Tensor, packed: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return a tensor of the right shape, by which the compiler plans."""
    return states.new_empty((*states.shape[:-1], out))


_library = torch.library.Library("decodekit", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "packed_linear(Tensor states, Tensor packed, Tensor? bias, int out) -> Tensor"
)
_library.impl("packed_linear", _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("decodekit::packed_linear", _fake, lib=_library)


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight [out, in] laid out for oneDNN; only its kernels can read it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def span_of(packed: Tensor) -> tuple[int, int] | None:
    """Return the first address of a packed weight and the one behind its last; None if unknown."""
    try:
        start = int(torch.ops.mkldnn.data_ptr(packed))
        return start, start + int(torch.ops.mkldnn._nbytes(packed))
    except (AttributeError, RuntimeError):
        return None
