"""The private torch operators for weights packed by oneDNN: used here and nowhere else.

Torch's compiler uses them when it freezes a model. Whoever calls them has tried them before, see
``packed.can_pack``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decodekit.backends.call_sizes import FEW, MORE, CallSizes, find_sizes, in_calls, probe_weights

__all__ = ["call_sizes", "pack_weight", "packed_linear", "run_packed", "span_of"]

_LARGE = 1 << 24
"""A weight of more numbers is probed as it is: to make another would take too much memory, and its
outputs are so many that a few show another order whatever the rounding hides."""

_found: dict[tuple[object, ...], CallSizes] = {}  # as many as there are shapes, twice


def run_packed(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``states @ weight.T + bias`` [..., out] for states [..., in]; see ``call_sizes``."""
    width = states.shape[-1]
    flat = states.reshape(-1, width)
    if not len(flat):
        return states.new_empty((*states.shape[:-1], packed.shape[0]))
    calls = call_sizes(packed, bias, rows=len(flat)).calls(len(flat))
    output = in_calls(lambda some: _run(some, packed, bias), flat, calls)
    return output.view(*states.shape[:-1], output.shape[-1])


def call_sizes(packed: Tensor, bias: Tensor | None, *, rows: int = 1) -> CallSizes:
    """Return the numbers of rows that calls of a packed layer may have.

    They are found out when they are first asked for, once in a process for all layers of a shape
    and a number of threads.

    Args:
        packed: Of ``pack_weight``.
        bias: [out], or None.
        rows: How many are to be run.
    """
    many = rows > FEW[-1]
    key = (*packed.shape, packed.dtype, bias is None, torch.get_num_threads(), many)
    found = _found.get(key)
    if found is None:
        before = call_sizes(packed, bias) if many else None
        found = _found[key] = _find(packed, bias, before)
    return found


def _find(packed: Tensor, bias: Tensor | None, before: CallSizes | None) -> CallSizes:
    out, width = packed.shape
    if out * width <= _LARGE:
        weights, states = probe_weights(width, out, packed.dtype)
        packed, bias = pack_weight(weights), None if bias is None else torch.zeros_like(bias)
    else:
        draws = torch.Generator().manual_seed(0)  # not the user's
        states = torch.randn(2, width, generator=draws, device="cpu").to(packed.dtype)
    sizes = FEW if before is None else MORE
    return find_sizes(lambda some: _run(some, packed, bias), states, sizes, before)


def _run(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
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
