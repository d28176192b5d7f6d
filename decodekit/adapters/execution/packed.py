"""Linear layers with weights packed once for the CPU.

``torch.nn.functional.linear`` reads a plain weight matrix anew at every call, in whatever layout it
has; for a few rows most of its time goes into that. oneDNN can lay a weight out once for its own
kernels (see ``packed_operator``).

Measured on two cores of an AMD EPYC (Zen 4), SmolLM2-135M, float32, 300 tokens of context, a whole
step in milliseconds at 1, 2, 3, 8, 13 and 32 rows: 55, 89, 109, 76, 89, 118 plain; 37, 42, 38, 42,
49, 77 packed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from decodekit.adapters.execution.fused import fused_linear, layers_lock
from decodekit.adapters.execution.huge_pages import use_huge_pages
from decodekit.adapters.execution.onednn import call_sizes, pack_weight, run_packed, span_of
from decodekit.adapters.execution.release import release_mapped, trim_heap
from decodekit.backends.call_sizes import CallSizes
from decodekit.errors import ConfigError

__all__ = ["PackedLinear", "PackedRows", "can_pack", "can_pack_model", "pack_linears"]

_MOST_TWICE = 0.25
"""A tied weight that is a larger part of the model is not held twice."""


def _fixed(what: str) -> ConfigError:
    return ConfigError(
        f"packed linear layers cannot be {what}; load the model again with execution=eager",
        key="execution",
        value="packed",
    )


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU; the plain weight is not kept.

    Args:
        linear: The layer that it stands for, on a CPU.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = pack_weight(linear.weight.detach())
        self.plain_bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, states: Tensor) -> Tensor:
        """Return ``states @ weight.T + bias`` for states [..., in_features]."""
        return run_packed(states, self.packed, self.plain_bias)

    @property
    def call_sizes(self) -> CallSizes:
        """The numbers of rows that it is called with, for the threads that torch has now."""
        return call_sizes(self.packed, self.plain_bias)

    @property
    def weight(self) -> Tensor:
        """The packed weight, for its shape, dtype and device: only oneDNN can read its numbers.

        LoRA layers, for example, ask the layers in them for their dtype.
        """
        return self.packed

    @property
    def bias(self) -> Tensor | None:
        """The bias [out_features], or None."""
        return self.plain_bias

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """Return a copy that shares the packed weight, which nobody can change."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self.packed)] = self.packed
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> Any:
        """Refuse to be pickled."""
        raise _fixed("saved")

    def _save_to_state_dict(self, *given: Any) -> None:
        raise _fixed("saved")  # else a checkpoint without these weights would be written

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        like = torch.empty(0, dtype=self.packed.dtype, device="cpu")
        new = fn(like)
        if (new.dtype, new.device) != (like.dtype, like.device):
            raise _fixed("cast or moved")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedRows(nn.Module):
    """One layer of a fused group that was packed as a whole: it runs all of it and keeps its part.

    That costs its callers the time of the whole group. Whoever needs all parts runs ``whole`` once.

    Args:
        whole: The packed group.
        start: Its first output there.
        out_features: The number of its outputs.
    """

    def __init__(self, whole: PackedLinear, *, start: int, out_features: int) -> None:
        super().__init__()
        self.whole = whole
        self.start = start
        self.in_features = whole.in_features
        self.out_features = out_features

    def forward(self, states: Tensor) -> Tensor:
        """Return this layer's outputs for states [..., in_features]."""
        output: Tensor = self.whole(states)[..., self.start : self.start + self.out_features]
        return output

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of the layer."""
        return f"start={self.start}, out_features={self.out_features}"


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether packed layers of ``dtype`` work here, by trying one."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            linear = nn.Linear(48, 32, dtype=dtype, device="cpu")
            states = torch.randn(1, 3, 48, device="cpu").to(dtype)
            return torch.allclose(
                PackedLinear(linear)(states).float(), linear(states).float(), atol=0.05
            )
        except (RuntimeError, AttributeError, NotImplementedError):
            return False


def can_pack_model(model: object) -> bool:
    """Return whether ``model`` is a module on a CPU with a linear layer that can be packed here."""
    return isinstance(model, nn.Module) and any(
        isinstance(layer, PackedLinear) or _can_pack_layer(layer) for layer in model.modules()
    )


def _can_pack_layer(layer: nn.Module) -> bool:
    # Exactly these classes: what a subclass, or a weight of another class, does would be lost.
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return False
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return False  # they would be lost too
    return layer.weight.device.type == "cpu" and can_pack(layer.weight.dtype)


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of ``model`` in place and return how many were replaced.

    A layer stays as it is where it is not on a CPU, where its dtype cannot be packed, where it or
    its weight is of a class of its own, a quantised one for example, and where it has a hook.
    Weights that are tied to another module, as an output head to the embedding, are held twice
    afterwards; a tied head of over a quarter of the model's memory stays plain. What is replaced is
    let go layer by layer, so that at most one layer is held twice. Layers that were fused (see
    ``decodekit.adapters.execution.fused``) are packed as the one layer that they are parts of.

    Args:
        model: In evaluation mode; it cannot be trained, saved, cast or moved afterwards.

    Raises:
        ConfigError: No layer could be packed.
    """
    replaced = 0
    with layers_lock:
        packed_before = any(isinstance(module, PackedLinear) for module in model.modules())
        spared = _too_large_to_hold_twice(model)
        # Without the linear layers themselves: a list of them would keep the weights of all.
        for parent in [module for module in model.modules() if not isinstance(module, nn.Linear)]:
            for group in _groups(parent, spared):
                _pack(parent, group)
                trim_heap()
                replaced += len(group)
        if replaced:
            layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
            for layer in layers:
                layer.call_sizes  # noqa: B018 - found out now and not in mid-text
            spans = [span_of(layer.packed) for layer in layers]
            use_huge_pages([span for span in spans if span is not None])
    if not replaced and not packed_before:
        raise ConfigError(
            "execution=packed found no linear layer that can be packed here; use execution=eager",
            key="execution",
            value="packed",
        )
    return replaced


def _too_large_to_hold_twice(model: nn.Module) -> set[int]:
    """Return the ids of the embeddings' weights that are over a quarter of the model's memory."""
    most = _MOST_TWICE * sum(weight.nbytes for weight in model.parameters())
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(one.weight) for one in embeddings if one.weight.nbytes > most}


def _groups(parent: nn.Module, spared: set[int]) -> Iterator[list[str]]:
    """Yield the names of the children that can be packed: together where they are fused.

    Args:
        parent: Of the children.
        spared: The ids of weights that stay as they are.
    """
    by_storage: dict[int, list[str]] = {}
    for name, child in parent.named_children():
        if not isinstance(child, nn.Linear) or not _can_pack_layer(child):
            continue
        if id(child.weight) not in spared:
            by_storage.setdefault(child.weight.untyped_storage().data_ptr(), []).append(name)
    for names in by_storage.values():
        if fused_linear([getattr(parent, name) for name in names]) is not None:
            yield names
        else:
            yield from ([name] for name in names)


def _pack(parent: nn.Module, names: list[str]) -> None:
    """Replace the children ``names``, a fused group or one layer, by packed ones."""
    linears = [getattr(parent, name) for name in names]
    if len(linears) == 1:
        setattr(parent, names[0], PackedLinear(linears[0]))
        release_mapped(linears[0].weight)
        return
    fused = fused_linear(linears)
    assert fused is not None
    whole, start = PackedLinear(fused), 0
    for name, linear in zip(names, linears, strict=True):
        setattr(parent, name, PackedRows(whole, start=start, out_features=linear.out_features))
        start += linear.out_features
