"""Attention by stock flash-attn, which knows no trees: two parts, merged by log-sum-exp.

The prefix is seen whole by every row, so an ordinary unmasked kernel runs over it. What is left is
small: the tail under its tree mask, and with a sliding window the prefix's border, the keys that
some rows see and others do not. A chain is causal and needs no mask.

Refuses softcap on a CPU, float32 and float64 on a GPU, and values of another width than keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decodekit.backends.flash_kernels import FlashKernel, select_kernel
from decodekit.backends.layout import rows_in_one_piece
from decodekit.backends.merge import merge_parts
from decodekit.errors import BackendError
from decodekit.interfaces.mask import TreeMask

__all__ = ["FlashBackend"]

_Run = tuple[int, int]  # a run of keys: the first, and the one after the last


@dataclass(frozen=True, slots=True)
class _Span:
    """The keys of one sequence, by how its rows see them. A run may be empty, not all of them.

    Attributes:
        rows: R of this sequence.
        dense: Keys that all rows see.
        causal: Keys for the kernel's causal mask.
        window: The window of ``causal``, or None.
        border: Keys of the prefix that only some rows see.
        tail: Keys of the tail, if they go by a mask.
        hidden: What ``border`` and ``tail`` hide, [R, border + tail].
    """

    rows: int
    dense: _Run = (0, 0)
    causal: _Run = (0, 0)
    window: int | None = None
    border: _Run = (0, 0)
    tail: _Run = (0, 0)
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Lowered:
    kernel: FlashKernel
    spans: tuple[_Span, ...]


class FlashBackend:
    """flash-attn 2, 3 or 4 on a GPU, torch's own flash kernel on a CPU."""

    name = "flash"

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Lowered:
        """Return, for every sequence, which keys go to which part; see ``MaskBuilder.lower``.

        Raises:
            BackendError: There is no kernel for ``device``.
        """
        kernel = select_kernel(device)
        spans = tuple(_span(mask, window, device, windows=kernel.windows) for mask in masks)
        return _Lowered(kernel, spans)

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
        kernel = lowered.kernel
        kernel.check(query, value)
        if softcap is not None and not kernel.softcaps:
            raise BackendError(
                "backend 'flash' cannot do logit softcapping on a CPU; use backend=eager",
                backend=self.name,
            )
        query, key, value = (rows_in_one_piece(states) for states in (query, key, value))
        outputs: list[Tensor] = []
        for index, span in enumerate(lowered.spans):
            one = slice(index, index + 1)
            q, k, v = query[one, :, : span.rows], key[one], value[one]
            parts: list[tuple[Tensor, Tensor]] = []
            if _length(span.dense):
                keys, values = _cut(k, span.dense), _cut(v, span.dense)
                parts.append(kernel(q, keys, values, scale=scale, softcap=softcap))
            if _length(span.causal):
                keys, values = _cut(k, span.causal), _cut(v, span.causal)
                parts.append(
                    kernel(
                        q,
                        keys,
                        values,
                        scale=scale,
                        causal=True,
                        window=span.window,
                        softcap=softcap,
                    )
                )
            if span.hidden is not None:
                keys = torch.cat([_cut(k, span.border), _cut(k, span.tail)], dim=2)
                values = torch.cat([_cut(v, span.border), _cut(v, span.tail)], dim=2)
                parts.append(_masked(q, keys, values, span.hidden, scale=scale, softcap=softcap))
            outputs.append(merge_parts(parts, sinks).transpose(1, 2))
        if len(outputs) == 1:
            return outputs[0]
        padded = query.new_zeros(query.transpose(1, 2).shape)
        for index, output in enumerate(outputs):
            padded[index, : output.shape[1]] = output[0]
        return padded


def _span(mask: TreeMask, window: int | None, device: torch.device, *, windows: bool) -> _Span:
    """Return the parts of one sequence; ``windows`` as for ``FlashKernel``."""
    prefix, rows, end = mask.prefix, mask.rows, mask.prefix + mask.rows
    if window is not None and max(mask.positions) < window:
        window = None  # it reaches back to the first key from everywhere
    # Row q sees the prefix from position q - window + 1 on.
    first = 0 if window is None else min(max(min(mask.positions) - window + 1, 0), prefix)
    dense = 0 if window is None else min(max(max(mask.positions) - window + 1, 0), prefix)
    if rows == 1:
        return _Span(rows, dense=(dense, end))
    if mask.is_causal:
        in_place = mask.positions == tuple(range(prefix, end))
        if windows and (window is None or in_place):
            return _Span(rows, causal=(first, end), window=window)
        if window is None:
            return _Span(rows, dense=(0, prefix), causal=(prefix, end))
    visible = mask.to_bool(window=window, device=device)
    shown = torch.cat([visible[:, first:dense], visible[:, prefix:]], dim=1)
    return _Span(
        rows, dense=(dense, prefix), border=(first, dense), tail=(prefix, end), hidden=~shown
    )


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, as a ``FlashKernel`` does, under a mask [R, S] of few keys.

    Every row sees one key at least: itself.
    """
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    q_BKGRD = query.reshape(batch, kv_heads, heads // kv_heads, rows, width).to(wide)
    scores = q_BKGRD @ key[:, :, None].to(wide).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    log = scores.logsumexp(dim=-1)
    output = (scores - log[..., None]).exp() @ value[:, :, None].to(wide)
    return output.to(query.dtype).flatten(1, 2), log.flatten(1, 2)


def _cut(states: Tensor, run: _Run) -> Tensor:
    return states[:, :, run[0] : run[1]]


def _length(run: _Run) -> int:
    return run[1] - run[0]
