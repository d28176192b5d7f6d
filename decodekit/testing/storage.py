"""Finding and poisoning the memory of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["poison", "tensors_of"]


def tensors_of(thing: object, *, apart_from: object) -> list[Tensor]:
    """Return the floating-point tensors that can be reached from ``thing`` by its attributes.

    Args:
        thing: A cache.
        apart_from: Tensors that can be reached from here are left out: the weights of the model.
    """
    kept = {tensor.data_ptr() for tensor in _walk(apart_from, set())}
    return [
        tensor
        for tensor in _walk(thing, set())
        if tensor.is_floating_point() and tensor.data_ptr() not in kept
    ]


def poison(tensors: Iterable[Tensor], value: float) -> None:
    """Fill tensors with a value, in place."""
    with torch.inference_mode():
        for tensor in tensors:
            tensor.fill_(value)


def _walk(thing: object, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    inside: list[object] = []
    if isinstance(thing, Mapping):
        inside += thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset)):
        inside += thing
    elif isinstance(thing, (type, ModuleType)):  # their attributes belong to everybody
        return
    inside += getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            inside.append(getattr(thing, name, None))
    for one in inside:
        yield from _walk(one, seen)
