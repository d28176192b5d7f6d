"""Attention added up in float64, block of rows by block: any mask, softcap and sinks.

Shapes: B batch, H query heads, K kv heads, R rows, S keys, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["wide_attention", "wide_part"]

_BLOCK = 64
"""Rows whose scores are held at once."""


def wide_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the output [B, H, R, D] in float64.

    Args:
        query: [B, H, R, D].
        key: [B, K, S, D]; H is a multiple of K.
        value: [B, K, S, D].
        mask: [B, 1, R, S] in float64, added to the scores; every row sees a key. None hides
            nothing.
        scale: Factor on the scores.
        softcap: As for ``AttentionBackend.attend``.
        sinks: Likewise.
    """
    key, value = key.to(torch.float64), value.to(torch.float64)
    outputs = []
    for rows, hidden in _blocks(query, mask):
        scores = _scores(rows, key, hidden, scale=scale, softcap=softcap)
        if sinks is not None:
            column = sinks.to(torch.float64).view(1, -1, 1, 1)
            column = column.expand(len(scores), -1, scores.shape[2], 1)
            scores = torch.cat([scores, column], dim=-1)
        outputs.append(_summed(scores.softmax(dim=-1)[..., : key.shape[2]], value))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def wide_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, R, D] over a part of the keys and its log-sum-exp [B, H, R].

    Both in float64; the arguments are those of ``wide_attention``.
    """
    key, value = key.to(torch.float64), value.to(torch.float64)
    outputs, logs = [], []
    for rows, hidden in _blocks(query, mask):
        scores = _scores(rows, key, hidden, scale=scale, softcap=None)
        logs.append(scores.logsumexp(dim=-1))
        outputs.append(_summed(scores.sub_(logs[-1][..., None]).exp_(), value))
    return torch.cat(outputs, dim=2), torch.cat(logs, dim=2)


def _blocks(query: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Return queries and their mask, some rows at a time."""
    rows = query.shape[2]
    if rows <= _BLOCK:
        return [(query, mask)]
    starts = [slice(start, start + _BLOCK) for start in range(0, rows, _BLOCK)]
    return [(query[:, :, at], None if mask is None else mask[:, :, at]) for at in starts]


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
) -> Tensor:
    """Return the scores [B, H, R, S] for keys in float64."""
    batch, heads, rows, width = query.shape
    kv_heads, keys = key.shape[1:3]
    # The rows of all query heads that share a kv head are one matrix: keys are never repeated.
    folded = (query.to(torch.float64) * scale).reshape(batch * kv_heads, -1, width)
    flat = key.reshape(batch * kv_heads, keys, width)
    scores = torch.bmm(folded, flat.transpose(1, 2)).view(batch, heads, rows, keys)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return scores if mask is None else scores.add_(mask)


def _summed(weights: Tensor, value: Tensor) -> Tensor:
    """Return the values [B, K, S, D] added up by weights [B, H, R, S], [B, H, R, D]."""
    batch, heads, rows, keys = weights.shape
    kv_heads = value.shape[1]
    folded = weights.reshape(batch * kv_heads, -1, keys)
    out = torch.bmm(folded, value.reshape(batch * kv_heads, keys, -1))
    return out.view(batch, heads, rows, -1)
