"""The default: a kernel for each step, by what the step is computed in.

On a CPU in half precision ``invariant``, so that every strategy writes the same tokens there too;
else ``sdpa``; and ``eager`` for layers with what ``sdpa`` cannot do, softcap and sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.interfaces.backend import AttentionBackend
from decodekit.interfaces.mask import TreeMask

__all__ = ["AutoBackend"]

_HALF = (torch.bfloat16, torch.float16)


class _Lowered:
    """The masks of a step, lowered for a kernel when the first layer asks for it."""

    def __init__(self, masks: Sequence[TreeMask], **how: Any) -> None:
        self._masks, self._how = masks, how
        self._made: dict[str, Any] = {}
        self.half_on_cpu = how["device"].type == "cpu" and how["dtype"] in _HALF

    def by(self, backend: AttentionBackend) -> Any:
        """Return what the backend's ``lower`` returns for this step."""
        if backend.name not in self._made:
            self._made[backend.name] = backend.lower(self._masks, **self._how)
        return self._made[backend.name]


class AutoBackend:
    """Supports what ``eager`` does.

    Args:
        plain: For layers with neither softcap nor sinks.
        complete: For all others.
        half: For every layer in half precision on a CPU.
    """

    name = "auto"

    def __init__(
        self, *, plain: AttentionBackend, complete: AttentionBackend, half: AttentionBackend
    ) -> None:
        self._plain, self._complete, self._half = plain, complete, half

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Lowered:
        """Return the masks, to be lowered when a layer asks; see ``MaskBuilder.lower``."""
        return _Lowered(masks, window=window, dtype=dtype, device=device)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lowered: _Lowered,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [B, R, H, D]; see ``AttentionBackend.attend``."""
        if lowered.half_on_cpu:
            backend = self._half
        else:
            backend = self._plain if softcap is None and sinks is None else self._complete
        masks = lowered.by(backend)
        return backend.attend(query, key, value, masks, scale=scale, softcap=softcap, sinks=sinks)
