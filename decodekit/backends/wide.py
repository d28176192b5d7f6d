"""Attention added up in float64, block of rows by block: any mask, softcap and sinks.

Shapes: B batch, H query heads, K kv heads, R rows, S keys, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["wide_attention"]

_BLOCK = 64
"""Rows whose scores are held at once."""


def wide_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, R, D] and its log-sum-exp [B, H, R], both in float64.

    Args:
        query: [B, H, R, D].
        key: [B, K, S, D]; H is a multiple of K.
        value: [B, K, S, D].
        mask: [B, 1, R, S] in float64, added to the scores; every row sees a key.
        scale: Factor on the scores.
        softcap: As for ``AttentionBackend.attend``.
        sinks: Likewise.
    """
    key, value = key.to(torch.float64), value.to(torch.float64)
    blocks = [
        _block(rows, key, value, hidden, scale=scale, softcap=softcap, sinks=sinks)
        for rows, hidden in zip(
            torch.split(query, _BLOCK, 2), torch.split(mask, _BLOCK, 2), strict=True
        )
    ]
    if len(blocks) == 1:
        return blocks[0]
    outputs, logs = zip(*blocks, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(logs, dim=2)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what ``wide_attention`` does, for some rows and keys and values in float64."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    # The rows of all query heads that share a kv head are one matrix: keys are never repeated.
    folded = query.to(torch.float64).reshape(batch, kv_heads, -1, width)
    scores_BHRS = (folded @ key.transpose(-1, -2)).view(batch, heads, rows, -1).mul_(scale)
    if softcap is not None:
        scores_BHRS = scores_BHRS.div_(softcap).tanh_().mul_(softcap)
    scores_BHRS += mask
    if sinks is not None:
        column = sinks.to(torch.float64).view(1, heads, 1, 1).expand(batch, -1, rows, 1)
        scores_BHRS = torch.cat([scores_BHRS, column], dim=-1)
    log = scores_BHRS.logsumexp(dim=-1)
    weights = scores_BHRS.sub_(log[..., None]).exp_()[..., : key.shape[2]]
    out = weights.reshape(batch, kv_heads, -1, key.shape[2]) @ value
    return out.view(batch, heads, rows, -1), log
