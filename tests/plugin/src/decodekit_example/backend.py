"""``backend=merged``: the prefix and the tail apart, joined by their log-sum-exp.

Every row of a tree sees the whole prefix, so that part needs no mask; the tail is small. Two
partial softmaxes with their log-sum-exp join exactly (Dao et al., 2022, arXiv 2205.14135).

Shapes: B batch, H query heads, K kv heads, G = H / K, R rows, P prefix, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decodekit.errors import BackendError
from decodekit.interfaces.mask import TreeMask, bool_to_additive

__all__ = ["MergedBackend"]


@dataclass(frozen=True)
class _Lowered:
    """The prefix of each sequence, and what the rows of its tail see of each other, [R, R]."""

    prefixes: list[int]
    tails: list[Tensor]


class MergedBackend:
    """Refuses sliding windows, where the prefix is not seen as a whole, softcap and sinks."""

    name = "merged"

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Lowered:
        """Return the prefixes and the masks of the tails."""
        if window is not None:
            raise BackendError(
                "backend 'merged' cannot do sliding windows; use backend=sdpa", backend=self.name
            )
        wide = torch.promote_types(dtype, torch.float32)
        tails = [mask.to_bool(device=device)[:, mask.prefix :] for mask in masks]
        return _Lowered(
            [mask.prefix for mask in masks], [bool_to_additive(tail, wide) for tail in tails]
        )

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
        """Return the attention output [B, R, H, D]."""
        if softcap is not None or sinks is not None:
            raise BackendError(
                "backend 'merged' cannot do softcap or sinks; use backend=eager", backend=self.name
            )
        batch, heads, rows, dim = query.shape
        out = query.new_zeros((batch, rows, heads, dim))
        for index, (prefix, tail) in enumerate(zip(lowered.prefixes, lowered.tails, strict=True)):
            used = len(tail)  # the rows after these only pad the sequence
            wide = tail.dtype
            groups = heads // key.shape[1]
            q = query[index, :, :used].to(wide).reshape(-1, groups, used, dim) * scale  # KGRD
            k = key[index, :, None, : prefix + used].to(wide)
            v = value[index, :, None, : prefix + used].to(wide)
            joined, total = _part(q, k[:, :, prefix:], v[:, :, prefix:], tail)
            if prefix:
                dense, weight = _part(q, k[:, :, :prefix], v[:, :, :prefix], None)
                both = torch.logaddexp(total, weight)
                joined = joined * (total - both).exp() + dense * (weight - both).exp()
            out[index, :used] = joined.flatten(0, 1).transpose(0, 1).to(query.dtype)
        return out


def _part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention over some keys, and the log-sum-exp of its scores [K, G, R, 1]."""
    scores = q @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    total = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - total).exp() @ v, total
