"""Attention by plain matrix products in float32: the reference for every other kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decodekit.interfaces.mask import TreeMask, bool_to_additive, pad_masks

__all__ = ["EagerBackend"]


class EagerBackend:
    """Supports softcap, sinks, windows, any dtype and any device, and is fast at nothing."""

    name = "eager"

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return the masks as one tensor to add to the scores, [B, 1, 1, R, S] in float32 or wider.

        See ``MaskBuilder.lower``.
        """
        mask = pad_masks(list(masks), window=window, device=device)
        return bool_to_additive(mask, torch.promote_types(dtype, torch.float32))[:, None, None]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lowered: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [B, R, H, D]; see ``AttentionBackend.attend``."""
        batch, heads, rows, width = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        # Query heads that share a kv head become one more dimension: keys are never repeated.
        wide = lowered.dtype
        q_BKGRD = query.reshape(batch, kv_heads, groups, rows, width).to(wide)
        scores = q_BKGRD @ key[:, :, None].to(wide).transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + lowered
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, kv_heads, groups, 1, 1)
            scores = torch.cat([scores, column.expand(batch, -1, -1, rows, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : key.shape[2]]
        out_BKGRD = weights @ value[:, :, None].to(wide)
        return out_BKGRD.to(query.dtype).flatten(1, 2).transpose(1, 2)
