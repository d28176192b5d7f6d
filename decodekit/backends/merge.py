"""Softmaxes over parts of the keys, joined into the softmax over all of them.

A part's output is its own softmax times its values, and its weight in the whole is the sum of the
exponentials of its scores. Kernels return the logarithm of that sum, so that nothing overflows
(Dao et al., FlashAttention, arXiv 2205.14135, section 3.1).

Shapes: B batch, H query heads, R rows, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["merge_parts"]


def merge_parts(parts: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> Tensor:
    """Return the attention output [B, H, R, D] over the keys of all parts, in the parts' dtype.

    Args:
        parts: For each part its output [B, H, R, D] and its log-sum-exp [B, H, R]: minus infinity
            for a row that sees none of the part's keys, whose output must then be finite.
        sinks: [H], one further score per head with a value of 0.

    Returns:
        0 for a row that sees no key in any part.
    """
    dtype = parts[0][0].dtype
    if len(parts) == 1 and sinks is None:
        return parts[0][0]
    wide = torch.promote_types(dtype, torch.float32)
    logs = [log.to(wide) for _, log in parts]
    if sinks is not None:
        logs.append(sinks.to(wide).view(1, -1, 1).expand_as(logs[0]))
    total = torch.stack(logs).logsumexp(dim=0)
    # A row that sees nothing at all: minus infinity minus itself would be NaN.
    total = total.masked_fill(total == float("-inf"), 0.0)
    merged = torch.zeros_like(parts[0][0], dtype=wide)
    for (output, _), log in zip(parts, logs, strict=False):  # a sink has a log and no output
        merged += output.to(wide) * (log - total).exp()[..., None]
    return merged.to(dtype)
