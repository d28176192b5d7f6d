"""How rows attend: the protocols of an attention backend.

Shapes: B batch, H query heads, K kv heads, D head dim, R rows, P prefix, S = P + R.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from decodekit.interfaces.mask import TreeMask

__all__ = ["AttentionBackend", "MaskBuilder"]


@runtime_checkable
class MaskBuilder(Protocol):
    """Turns mask descriptions into what a kernel takes, once per step."""

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """Return the kernel's form of the masks of B sequences.

        Args:
            masks: One mask per sequence.
            window: The sliding window of the layers it is for; None for full attention.
            dtype: The dtype of queries and keys.
            device: Their device.
        """
        ...


@runtime_checkable
class AttentionBackend(MaskBuilder, Protocol):
    """One attention kernel: lowers the masks of a step once, attends once per layer.

    One that is compiled for each number of keys anew has a method ``key_rows(rows: int) -> int``
    that rounds S up to one of few, and does not fall with it. An adapter may then hand over keys
    and values of that length, of which the last rows mean nothing but are finite; one that does
    not costs the backend a copy.
    """

    @property
    def name(self) -> str:
        """The name that it is registered under."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lowered: Any,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [B, R, H, D].

        Args:
            query: [B, H, R, D].
            key: [B, K, S, D], the prefix's rows first; H is a multiple of K.
            value: [B, K, S, D].
            lowered: What ``lower`` returned for this step and this layer's window.
            scale: Factor on the scores.
            softcap: Scores become ``softcap * tanh(scores / softcap)`` before the mask.
            sinks: [H], one further score per head that takes part in the softmax and adds nothing.

        Raises:
            BackendError: The backend does not support ``softcap`` or ``sinks``.
        """
        ...
