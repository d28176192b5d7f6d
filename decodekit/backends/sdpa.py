"""Attention by ``torch.nn.functional.scaled_dot_product_attention``.

Refuses softcap and sinks, which that function has no argument for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decodekit.errors import BackendError
from decodekit.interfaces.mask import TreeMask, bool_to_additive, pad_masks

__all__ = ["SDPABackend"]

_FOLDED_ROWS = 32
"""Rows that torch's kernel for CPUs takes at once; for more of them nothing is gained."""


@dataclass(frozen=True, slots=True)
class _Lowered:
    """Either a mask [B, 1, R, S] to add, or none because the kernel's own visibility is right."""

    mask: Tensor | None
    causal: bool
    _repeated: dict[int, Tensor] = field(default_factory=dict)

    def repeated(self, groups: int) -> Tensor | None:
        """Return the mask [B, 1, groups * R, S], the rows once for each query head of a group."""
        if self.mask is None:
            return None
        if groups not in self._repeated:
            self._repeated[groups] = self.mask.repeat(1, 1, groups, 1)
        return self._repeated[groups]


class SDPABackend:
    """The default: grouped query heads without repeats, causal prefill without a mask."""

    name = "sdpa"

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Lowered:
        """Return the masks as an additive tensor, or as nothing where nothing is hidden.

        See ``MaskBuilder.lower``.
        """
        if len(masks) == 1:
            mask = masks[0]
            if window is None or mask.prefix + mask.rows <= window:
                if mask.rows == 1:
                    return _Lowered(mask=None, causal=False)
                # The kernel's causal mask is aligned to the first key: right without a prefix only.
                if mask.prefix == 0 and mask.is_causal:
                    return _Lowered(mask=None, causal=True)
        visible = pad_masks(list(masks), window=window, device=device)
        return _Lowered(mask=bool_to_additive(visible, dtype)[:, None], causal=False)

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
        if softcap is not None or sinks is not None:
            what = "logit softcapping" if softcap is not None else "attention sinks"
            raise BackendError(
                f"backend 'sdpa' cannot do {what}; use backend=eager", backend=self.name
            )
        batch, heads, rows, width = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        if groups > 1 and groups * rows <= _FOLDED_ROWS and _folds(query, lowered):
            # All heads that share keys in one go: the kernel reads the keys once, and has a slow
            # way for one row alone.
            folded = scaled_dot_product_attention(
                query.reshape(batch, kv_heads, groups * rows, width),
                key,
                value,
                attn_mask=lowered.repeated(groups),
                scale=scale,
            )
            return folded.reshape(batch, heads, rows, -1).transpose(1, 2)
        out_BHRD = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=lowered.mask,
            is_causal=lowered.causal,
            scale=scale,
            enable_gqa=groups > 1,
        )
        return out_BHRD.transpose(1, 2)


def _folds(query: Tensor, lowered: _Lowered) -> bool:
    """Return whether the query heads of a group may be given as rows: on a CPU, by our mask."""
    return query.device.type == "cpu" and not lowered.causal
