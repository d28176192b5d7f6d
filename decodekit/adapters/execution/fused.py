"""Linear layers that read the same input, as one: their weights lie one behind the other.

Nothing is held twice. The separate layers stay usable, each weight a view of its rows of the one;
that they are views, and of nothing besides, is how a fused group is known again.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

import torch
from torch import Tensor, nn

from decodekit.adapters.execution.release import release_mapped, trim_heap

__all__ = ["fuse_linears", "fused_linear", "have_biases_alike", "layers_lock"]

layers_lock = RLock()
"""Held by who changes the layers of a model, or reads all of them: in one piece or not at all."""


def fuse_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return one layer whose outputs are those of ``linears``, in order.

    The weights are copied into one tensor and then become views of it: for a moment the group's
    memory is taken twice, and afterwards once. Layers that are fused already stay as they are.

    Args:
        linears: Two or more of the same input, dtype and device, with ``have_biases_alike`` and no
            tensor in common; their weights are not of inference mode.
    """
    # Views made in inference mode could not be used outside it any more.
    with layers_lock, torch.inference_mode(False), torch.no_grad():
        for group in _parameters(linears):
            if _whole(group) is None:
                _join(group)
        whole = fused_linear(linears)
    assert whole is not None
    return whole


def have_biases_alike(linears: Sequence[nn.Linear]) -> bool:
    """Return whether all of ``linears`` have a bias, or none has one, so that they can be fused."""
    return len({linear.bias is None for linear in linears}) == 1


def fused_linear(linears: Sequence[nn.Linear]) -> nn.Linear | None:
    """Return the layer that ``linears`` are the rows of, in order; None if they are not fused."""
    if not have_biases_alike(linears):
        return None
    wholes = [_whole(group) for group in _parameters(linears)]
    weight, *bias = wholes
    if weight is None or None in bias:
        return None
    rows, columns = weight.shape
    # On "meta" first, where no memory is taken and no random numbers are drawn.
    linear = nn.Linear(columns, rows, bias=bool(bias), device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias and bias[0] is not None:
        linear.bias = nn.Parameter(bias[0], requires_grad=False)
    return linear


def _parameters(linears: Sequence[nn.Linear]) -> list[list[Tensor]]:
    """Return the weights and, where there are any, the biases."""
    groups = [[linear.weight for linear in linears]]
    if linears[0].bias is not None:
        groups.append([linear.bias for linear in linears])
    return groups


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that ``parts`` are the rows of, in order, if its storage has no others.

    That nothing else lies in the storage tells a fused group from tensors that happen to follow
    each other, as in a file that is mapped into memory.
    """
    first = parts[0].detach()
    start = first.data_ptr()
    storage = first.untyped_storage()
    if not start or start != storage.data_ptr():
        return None
    for part in parts:
        alike = part.shape[1:] == first.shape[1:] and part.dtype == first.dtype
        if part.data_ptr() != start or not alike or not part.is_contiguous():
            return None
        start += part.numel() * part.element_size()
    if start != storage.data_ptr() + storage.nbytes():
        return None
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _join(parts: Sequence[Tensor]) -> None:
    """Move ``parts`` into one new tensor, one behind the other; each becomes a view of it."""
    rows = [part.shape[0] for part in parts]
    whole = parts[0].new_empty((sum(rows), *parts[0].shape[1:]))
    for part, view in zip(parts, torch.split(whole, rows), strict=True):
        before = part.detach()
        part.data = view.copy_(part)
        release_mapped(before)
        del before  # or it would be there beside the next one
    trim_heap()
