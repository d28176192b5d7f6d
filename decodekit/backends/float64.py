"""Attention added up in float64, block of rows by block: any mask, softcap and sinks.

Shapes: B batch, H query heads, K kv heads, R rows, S keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["wide_attention"]

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
    others: Sequence[tuple[Tensor, Tensor]] = (),
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
        others: Further keys that were attended to already, as outputs [B, H, R, D] and
            log-sum-exps [B, H, R]: to the softmax, each is one key with that score and that value.
    """
    key, value = key.to(torch.float64), value.to(torch.float64)
    rows = query.shape[2]
    outputs = []
    for start in range(0, rows, _BLOCK):
        at = slice(start, start + _BLOCK) if rows > _BLOCK else slice(None)
        scores = _scores(query[:, :, at], key, scale=scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask[:, :, at]
        columns = [log[:, :, at, None].to(torch.float64) for _, log in others]
        if sinks is not None:
            column = sinks.to(torch.float64).view(1, -1, 1, 1)
            columns.append(column.expand(len(scores), -1, scores.shape[2], 1))
        if columns:
            scores = torch.cat([scores, *columns], dim=-1)
        weights = scores.softmax(dim=-1)
        output = _summed(weights[..., : key.shape[2]], value)
        for place, (other, _) in enumerate(others, start=key.shape[2]):
            output.addcmul_(weights[..., place : place + 1], other[:, :, at].to(torch.float64))
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _scores(query: Tensor, key: Tensor, *, scale: float) -> Tensor:
    """Return the scores [B, H, R, S] for keys in float64."""
    batch, heads, rows, width = query.shape
    kv_heads, keys = key.shape[1:3]
    # The rows of all query heads that share a kv head are one matrix: keys are never repeated.
    folded = (query.to(torch.float64) * scale).reshape(batch * kv_heads, -1, width)
    flat = key.reshape(batch * kv_heads, keys, width)
    return torch.bmm(folded, flat.transpose(1, 2)).view(batch, heads, rows, keys)


def _summed(weights: Tensor, value: Tensor) -> Tensor:
    """Return the values [B, K, S, D] added up by weights [B, H, R, S], [B, H, R, D]."""
    batch, heads, rows, keys = weights.shape
    kv_heads = value.shape[1]
    folded = weights.reshape(batch * kv_heads, -1, keys)
    out = torch.bmm(folded, value.reshape(batch * kv_heads, keys, -1))
    return out.view(batch, heads, rows, -1)
