"""The door through which a ``transformers`` model calls our attention backends.

``transformers`` looks its attention function up by name and hands extra keyword arguments of
``model.forward`` on to it. So the step's backend and masks travel with the call, never through a
global, and the model's files stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from decodekit.adapters.model_lock import lock_of
from decodekit.errors import BackendError
from decodekit.interfaces.backend import AttentionBackend
from decodekit.interfaces.mask import TreeMask

__all__ = [
    "NAME",
    "NoStepError",
    "StepAttention",
    "attention_of",
    "windows_of_masks",
]

NAME = "decodekit"
"""The name of our attention function in ``transformers``' registry."""

_IN_USE = (
    "the model is in the middle of a decodekit step in another thread; run it from one thread at a "
    "time, or give the decoder a copy"
)

_STEP = "decodekit_step"
_WINDOW = "decodekit_window"

_UNSUPPORTED = ("position_bias", "alibi", "head_mask")


class NoStepError(BackendError):
    """Our attention, or our mask, was asked for without a step, or outside the one under way."""

    def __init__(self) -> None:
        super().__init__(_IN_USE)


class StepAttention:
    """The masks of one step, lowered at most once per window size and device.

    It is given to ``model.forward`` twice, since models differ in what they hand on: by keyword and
    as an attribute of an empty mask (``carrier``).

    Args:
        backend: The kernel.
        masks: One mask per sequence.
    """

    def __init__(self, backend: AttentionBackend, masks: list[TreeMask]) -> None:
        self.backend = backend
        self.masks = masks
        self.layers = 0  # that have called us
        # Of masks that transformers made, and of the layers that got them.
        self.windows: set[tuple[int | None, int | None]] = set()
        self._lowered: dict[tuple[int | None, torch.dtype, torch.device], Any] = {}

    def carrier(self, device: torch.device) -> Tensor:
        """Return an empty 4-D mask that carries the step.

        A 4-D mask is passed through untouched, which saves building one. It is empty, so that a
        layer that used it would fail and not see too much.
        """
        mask = torch.ones((1, 1, 0, 0), device=device)
        setattr(mask, _STEP, self)
        return mask

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention output [B, R, H, D] of one layer."""
        self.layers += 1
        form = (window, query.dtype, query.device)
        if form not in self._lowered:
            self._lowered[form] = self.backend.lower(
                self.masks, window=window, dtype=query.dtype, device=query.device
            )
        return self.backend.attend(
            query, key, value, self._lowered[form], scale=scale, softcap=softcap, sinks=sinks
        )


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    decodekit_step: StepAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that ``transformers`` calls once per layer."""
    # Some models keep keyword arguments to themselves; all hand on the mask that they are given.
    decodekit_step = decodekit_step or getattr(attention_mask, _STEP, None)
    if decodekit_step is None:
        raise NoStepError
    if hasattr(attention_mask, _WINDOW):
        decodekit_step.windows.add((getattr(attention_mask, _WINDOW), sliding_window))
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise BackendError(
                f"the model passes {name!r} to attention, which no backend supports",
                backend=decodekit_step.backend.name,
            )
    output = decodekit_step.attend(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    # As transformers' own functions leave it: some models take views of it.
    return output.contiguous(), None


_asking: ContextVar[StepAttention | None] = ContextVar("asking", default=None)


def _mask(*, device: torch.device, local_size: int | None = None, **kwargs: Any) -> Tensor:
    """The mask function of ours: a step gives its mask itself, so else only a stranger asks."""
    step = _asking.get()
    if step is None:
        raise NoStepError
    mask = step.carrier(device)
    setattr(mask, _WINDOW, local_size)
    return mask


def windows_of_masks(
    model: PreTrainedModel, step: StepAttention, tokens: Tensor
) -> set[tuple[int | None, int | None]]:
    """Return the windows that ``model`` puts into its masks, each with what it tells attention.

    It makes its masks itself, this once, with a function of ours that says which window it wants.
    A model that makes them in another way has none that are known.

    Args:
        model: The model.
        step: A step for the rows of ``tokens``.
        tokens: [B, R].
    """
    asking = _asking.set(step)
    try:
        with attention_of(model), suppress(Exception):
            model(input_ids=tokens, use_cache=False)
    finally:
        _asking.reset(asking)
    return step.windows


# Both registries, or transformers would take the mask for None and ignore it.
AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def attention_of(model: PreTrainedModel) -> Iterator[None]:
    """Make ``model`` call our attention function inside the block, and its own again after it.

    One thread at a time per model, whatever the number of adapters over it: another would take the
    model's attention away in the middle of a pass.
    """
    with lock_of(model):
        config = model.config
        before = config._attn_implementation
        config._attn_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation = before
