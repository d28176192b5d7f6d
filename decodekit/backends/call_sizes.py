"""The numbers of rows that a linear layer is called with, so that its rows keep their bits.

How a kernel adds up a row may depend on how many rows it is given: that is a property of processor,
library, number of threads and shape. A processor with AVX-512 was seen to add up one row in another
order than two or more; a processor with AMX 33 rows in another order than 32, and 37 in a third. So
it is found out for each shape: a layer is called with few numbers of rows, each of which was tried
first, and only with such as give a row the same bits. Other numbers of rows are filled up or cut.
He et al., "Defeating Nondeterminism in LLM Inference" (2025), call that batch invariance.

Few numbers of rows also keep memory flat: a library keeps what it has made for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["FEW", "MORE", "CallSizes", "Layer", "find_sizes", "in_calls", "probe_weights"]

Layer: TypeAlias = Callable[[Tensor], Tensor]
"""Returns outputs [N, out] for states [N, in]."""

FEW = (4, 8, 16, 24, 32)
"""Tried when a layer is laid out. One row takes no less time than four where that was measured."""

MORE = (40, 48, 56, 64, 80, 96, 112, 128)
"""Tried when a call of more rows than ``FEW`` comes for the first time. More rows are cut."""

_CALL = 12
"""What a call costs apart from its rows, in rows: the weights are read."""

_STEPS = (1, 4, 8, 16, 32, 64, 128)
"""Rows of the steps that sizes are judged by."""


@dataclass(frozen=True, slots=True)
class CallSizes:
    """The numbers of rows that calls may have.

    Attributes:
        sizes: They, ascending.
        invariant: Whether a row has the same bits in all of these calls, wherever it stands. If
            not, there are no such sizes here, and nothing is promised.
    """

    sizes: tuple[int, ...]
    invariant: bool

    def calls(self, rows: int) -> list[int]:
        """Return the rows of each call for ``rows``, 1 or more; their sum may be larger."""
        most = self.sizes[-1]
        whole, rest = divmod(rows, most)
        calls = [most] * whole
        if rest:
            calls.append(next(size for size in self.sizes if size >= rest))
        return calls


def in_calls(layer: Layer, states: Tensor, calls: Sequence[int]) -> Tensor:
    """Return the outputs [N, out] of states [N, in], in calls of so many rows.

    Args:
        layer: What is called.
        states: The rows.
        calls: The rows of each call; those beyond N are filled up with zeros.
    """
    rows, run = len(states), sum(calls)
    if rows < run:
        states = pad(states, (0, 0, 0, run - rows))
    if len(calls) == 1:
        return layer(states.contiguous())[:rows]
    parts = torch.split(states, list(calls))
    return torch.cat([layer(part.contiguous()) for part in parts])[:rows]


def find_sizes(
    layer: Layer, states: Tensor, sizes: Sequence[int], found: CallSizes | None = None
) -> CallSizes:
    """Return which of ``sizes`` give a row the same bits, the best of several such groups.

    Args:
        layer: What is called.
        states: A few rows [P, in] whose outputs show in which order they were added up, as those
            of ``probe_weights`` do.
        sizes: Numbers of rows, ascending.
        found: What was found before, whose sizes the new ones have to agree with.
    """
    tried = [(size, _bits(layer, states, size)) for size in sizes]
    if found is not None:
        if not found.invariant:
            return CallSizes((*found.sizes, *sizes), invariant=False)
        same = _bits(layer, states, found.sizes[0])
        more = [size for size, bits in tried if _equal(bits, same)]
        return CallSizes((*found.sizes, *more), invariant=True)
    groups: list[tuple[Tensor, list[int]]] = []
    for size, bits in tried:
        if bits is None:
            continue
        for known, group in groups:
            if torch.equal(known, bits):
                group.append(size)
                break
        else:
            groups.append((bits, [size]))
    if not groups:
        return CallSizes(tuple(sizes), invariant=False)
    candidates = [CallSizes(tuple(group), invariant=True) for _, group in groups]
    return min(candidates, key=_cost)


def _bits(layer: Layer, states: Tensor, size: int) -> Tensor | None:
    """Return the outputs [P, out] of rows in calls of ``size``; None if the place matters."""
    outputs = []
    for state in states:
        output = layer(state.expand(size, -1).contiguous())
        if not torch.equal(output, output[:1].expand(size, -1)):
            return None
        outputs.append(output[0])
    return torch.stack(outputs)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _cost(found: CallSizes) -> int:
    """Return about how long steps take in calls of these sizes, in rows."""
    return sum(_CALL + call for rows in _STEPS for call in found.calls(rows))


def probe_weights(width: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weights [out, in] and states [1, in] whose exact outputs are zero.

    What comes out is nothing but what was rounded on the way, so that in half precision too any
    other order of adding up shows. With weights and states as they come, the rounding of the result
    hides that from nearly all outputs. The terms that cancel each other lie far apart, at random.

    Args:
        width: The number of inputs.
        out: The number of outputs.
        dtype: Of both.
    """
    draws = torch.Generator().manual_seed(0)  # not the user's
    half, kinds = width // 2, min(out, 64)
    with torch.device("cpu"):
        order = torch.randperm(2 * half, generator=draws)
        weights = torch.randn(kinds, half, generator=draws)
        states = torch.randn(1, half, generator=draws)
    both = [torch.cat([weights, -weights], 1), torch.cat([states, states], 1)]
    weights, states = (pad(each[:, order], (0, width % 2)).to(dtype) for each in both)
    return weights.repeat(-(-out // kinds), 1)[:out], states
