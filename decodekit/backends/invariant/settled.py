"""Attention of rows that see all of some keys, in calls that give each row the same bits.

How torch's kernel adds up a row depends on how many rows it is given: 32 at a time, and the last
few of a call may go another way. That is a property of processor and library, so what holds is
found out, as for linear layers, for the very number of keys; see ``batch_invariance``.

Shapes: H query heads, K kv heads, G = H / K, r rows, P settled keys, D head dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from decodekit.backends.call_sizes import FEW, MORE, CallSizes, find_sizes, in_calls
from decodekit.backends.flash_kernels import select_kernel

__all__ = ["attend_settled"]

_MANY = 2048
"""So many keys are halved, so that there is work for more threads than there are kv heads."""


def attend_settled(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float
) -> list[tuple[Tensor, Tensor]] | None:
    """Return outputs [1, H, r, D] and log-sum-exps [1, H, r], of all keys or of each half of them.

    Args:
        query: [1, H, r, D].
        key: [1, K, P, D]; P is even.
        value: [1, K, P, D].
        scale: Factor on the scores.

    Returns:
        None where no calls give a row the same bits; nothing was done then.
    """
    heads, rows, width = query.shape[1:]
    kv_heads, keys = key.shape[1:3]
    parts = 2 if keys >= _MANY else 1
    shape = (kv_heads, parts, keys // parts, width)
    key, value = (states[0].view(shape).transpose(0, 1) for states in (key, value))
    folded = query.reshape(kv_heads, -1, width).transpose(0, 1)
    sizes = _call_sizes(tuple(key.shape), key.dtype, scale, len(folded) > FEW[-1], *_settings())
    if not sizes.invariant:
        return None
    found = in_calls(_Call(key, value, scale), folded.flatten(1), sizes.calls(len(folded)))
    found = found.view(-1, parts, kv_heads, 1 + width).permute(1, 2, 0, 3)
    output = found[..., :width].reshape(parts, 1, heads, rows, width)
    return list(
        zip(output.to(query.dtype), found[..., width].reshape(parts, 1, heads, rows), strict=True)
    )


class _Call:
    """A call of the kernel as a function of rows: [N, K * D] to [N, parts * K * (D + 1)], float32.

    Args:
        key: [parts, K, P, D].
        value: Likewise.
        scale: Factor on the scores.
    """

    def __init__(self, key: Tensor, value: Tensor, scale: float) -> None:
        self._key, self._value, self._scale = key, value, scale

    def __call__(self, states: Tensor) -> Tensor:
        parts, kv_heads, _, width = self._key.shape
        query = states.view(-1, kv_heads, width).transpose(0, 1).expand(parts, -1, -1, -1)
        kernel = select_kernel(states.device)
        output, log = kernel(query.contiguous(), self._key, self._value, scale=self._scale)
        both = torch.cat([output.to(log.dtype), log[..., None]], dim=-1)
        return both.permute(2, 0, 1, 3).reshape(len(states), -1)


def _settings() -> tuple[int, ...]:
    """Return what may change the kernel's ways in a running process."""
    return (torch.get_num_threads(),)


@lru_cache(maxsize=4096)
def _call_sizes(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float, many: bool, *settings: int
) -> CallSizes:
    """Return the numbers of rows of calls; see ``batch_invariance``.

    Args:
        shape: [parts, K, P, D] of the keys.
        dtype: Of queries, keys and values.
        scale: Factor on the scores.
        many: Whether there are more rows than ``FEW``.
        settings: Those of ``_settings``.
    """
    before = _call_sizes(shape, dtype, scale, False, *settings) if many else None
    parts, kv_heads, keys, width = shape
    draws = torch.Generator().manual_seed(0)  # not the user's
    half = torch.Size((parts, kv_heads, keys // 2, width))
    with torch.device("cpu"):
        order = torch.randperm(keys, generator=draws)
        key, value = (torch.randn(half, generator=draws) for _ in range(2))
        states = torch.randn(2, kv_heads * width, generator=draws).to(dtype)
    # Each key is there twice, with a value and its opposite: what comes out is what was rounded.
    key, value = torch.cat([key, key], 2)[:, :, order], torch.cat([value, -value], 2)[:, :, order]
    call = _Call(key.to(dtype), value.to(dtype), scale)
    return find_sizes(call, states, MORE if many else FEW, before)
