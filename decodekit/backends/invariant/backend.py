"""Attention whose result for a row depends neither on the other rows nor on where its keys lie.

The rows of a guessed tree lie in other places than the same tokens committed one by one, and fast
kernels add up a row's keys in an order that depends on places and on the number of rows. In half
precision the last bit of that sum decides now and then which way an element is rounded, and some
tokens later the text is another one. Reproducibility as a matter of kernels that do not depend on
the batch: He et al., "Defeating Nondeterminism in LLM Inference" (2025).

- The last keys of a row, and all of a short text, are added up in float64. What the order changes
  there is some billion times smaller than a rounding step of half precision, so that in practice
  the rounded results are the same bits.
- In half precision on a CPU, keys far enough behind a row, the *settled* ones, are left to torch's
  flash kernel. How many they are follows from the row's position alone, they are committed, and so
  in place, whatever is guessed, and the kernel is called with numbers of rows that were found to
  give a row the same bits (``settled``); where there are none, these keys too are added up in
  float64. The two parts are merged by their log-sum-exp.
- So is a long prompt: its rows come in the same calls whatever is guessed below it.

Shapes: B batch, H query heads, K kv heads, G = H / K, R rows, r some of them, L leading rows,
S keys, P settled keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from decodekit.backends.float64 import wide_attention
from decodekit.backends.invariant.settled import attend_settled
from decodekit.backends.layout import rows_in_one_piece
from decodekit.errors import BackendError
from decodekit.interfaces.mask import TreeMask, bool_to_additive, pad_masks

__all__ = ["InvariantBackend"]

_LONG = 16
"""More leading rows than this are a prompt."""

_DEEP = 32
"""A row's own and the keys before it that are not settled, at least; trees may be as deep."""

_SETTLED = 64
"""Keys are settled so many at a time, ..."""

_FROM = 256
"""... and so many at first: for fewer a second kernel does not pay."""

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of a sequence with P settled keys each: their places, P and a mask [1, 1, r, S - P]."""

    rows: slice | Tensor
    settled: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Parts:
    """One sequence: L leading rows with their keys and their mask [L, S], None if causal."""

    lead: int
    keys: int
    mask: Tensor | None
    groups: tuple[_Group, ...]


@dataclass(frozen=True, slots=True)
class _Lowered:
    """What is seen, [B, R, S], and the parts of each sequence.

    Attributes:
        visible: None where one row sees all there is.
        parts: None where all rows go the same way, as they are.
    """

    visible: Tensor | None
    parts: tuple[_Parts, ...] | None
    _masks: list[Tensor] = field(default_factory=list)

    def mask(self) -> Tensor | None:
        """Return the whole mask to be added, [B, 1, R, S] in float64, made when it is needed."""
        if self.visible is None:
            return None
        if not self._masks:
            self._masks.append(bool_to_additive(self.visible, torch.float64)[:, None])
        return self._masks[0]


class InvariantBackend:
    """Supports softcap, sinks, windows, any dtype, and any device that has float64."""

    name = "invariant"

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Lowered:
        """Return the masks to be added, and which rows go which way; see ``MaskBuilder.lower``.

        Raises:
            BackendError: The device has no float64.
        """
        if device.type == "mps":
            raise BackendError(
                "backend 'invariant' needs float64, which device 'mps' has not; use backend=sdpa",
                backend=self.name,
            )
        if window is not None and max(max(mask.positions) for mask in masks) < window:
            window = None  # it hides nothing
        visible = None
        if len(masks) > 1 or masks[0].rows > 1 or window is not None:
            visible = pad_masks(list(masks), window=window, device=device)
        settles = device.type == "cpu" and dtype in _HALF
        rows = [_rows_by_settled(mask, window, settles=settles) for mask in masks]
        if not any(_lead_of(mask) or max(found) for mask, found in zip(masks, rows, strict=True)):
            return _Lowered(visible, None)
        parts = tuple(
            _Parts(
                *_lead(mask, visible, index, window, dtype),
                _groups(mask, visible, index, found),
            )
            for index, (mask, found) in enumerate(zip(masks, rows, strict=True))
        )
        return _Lowered(visible, parts)

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
        special = softcap is not None or sinks is not None or query.shape[-1] != value.shape[-1]
        if lowered.parts is None or special:
            output = wide_attention(
                query, key, value, lowered.mask(), scale=scale, softcap=softcap, sinks=sinks
            )
            return output.to(query.dtype).transpose(1, 2)
        query, key, value = (rows_in_one_piece(states) for states in (query, key, value))
        output = torch.zeros_like(query)
        # One by one: a prompt's result must not depend on which others it is run with.
        for index, parts in enumerate(lowered.parts):
            q, k, v = (states[index : index + 1] for states in (query, key, value))
            if parts.lead:
                output[index, :, : parts.lead] = scaled_dot_product_attention(
                    q[:, :, : parts.lead],
                    k[:, :, : parts.keys],
                    v[:, :, : parts.keys],
                    attn_mask=parts.mask,
                    is_causal=parts.mask is None,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )[0]
            for group in parts.groups:
                output[index, :, group.rows] = _attend(q[:, :, group.rows], k, v, group, scale)[0]
        return output.transpose(1, 2)


def _lead_of(mask: TreeMask) -> int:
    """Return L, the leading rows if they are a prompt, else 0."""
    return mask.lead if mask.lead > _LONG else 0


def _lead(
    mask: TreeMask, visible: Tensor | None, index: int, window: int | None, dtype: torch.dtype
) -> tuple[int, int, Tensor | None]:
    """Return the rows of a prompt that a sequence starts with, their keys, and their mask.

    Args:
        mask: What the sequence's rows see.
        visible: The same for all sequences, [B, R, S]; None if nothing is hidden.
        index: Which sequence.
        window: The layers' sliding window.
        dtype: Of queries, keys and values.
    """
    rows = _lead_of(mask)
    keys = mask.prefix + rows
    causal = mask.prefix == 0 and (window is None or rows <= window)
    if not rows or causal or visible is None:
        return rows, keys, None
    return rows, keys, bool_to_additive(visible[index, :rows, :keys], dtype)


def _rows_by_settled(mask: TreeMask, window: int | None, *, settles: bool) -> dict[int, list[int]]:
    """Return the rows behind the lead by how many settled keys they have.

    Nothing but a row's own position decides, so that it is the same for its token alone. A window
    that hides something from a row leaves it nothing settled.
    """
    found: dict[int, list[int]] = {}
    in_place = mask.prefix + mask.lead
    for row in range(_lead_of(mask), mask.rows):
        position = mask.positions[row]
        settled = min(position - _DEEP, in_place) // _SETTLED * _SETTLED
        if not settles or settled < _FROM or (window is not None and position >= window):
            settled = 0
        found.setdefault(settled, []).append(row)
    return found


def _groups(
    mask: TreeMask, visible: Tensor | None, index: int, found: dict[int, list[int]]
) -> tuple[_Group, ...]:
    """Return the rows behind the lead in groups.

    Args:
        mask: What the sequence's rows see.
        visible: What all sequences' rows see, [B, R, S]; None if nothing is hidden.
        index: Which sequence.
        found: Of ``_rows_by_settled``.
    """
    groups = []
    for settled, rows in found.items():
        at: slice | Tensor = slice(_lead_of(mask), mask.rows)
        if len(found) > 1:
            at = torch.tensor(rows, device=None if visible is None else visible.device)
        hidden = None
        if visible is not None:
            seen = visible[index, at, settled:]
            hidden = bool_to_additive(seen, torch.float64)[None, None]
        groups.append(_Group(at, settled, hidden))
    return tuple(groups)


def _attend(query: Tensor, key: Tensor, value: Tensor, group: _Group, scale: float) -> Tensor:
    """Return the output [1, H, r, D] of a group's rows."""
    settled, mask = group.settled, group.mask
    others: list[tuple[Tensor, Tensor]] | None = []
    if settled:
        others = attend_settled(query, key[:, :, :settled], value[:, :, :settled], scale=scale)
        if others is not None:
            key, value = key[:, :, settled:], value[:, :, settled:]
        elif mask is not None:  # every row sees what is settled
            mask = pad(mask, (settled, 0))
    output = wide_attention(query, key, value, mask, scale=scale, others=others or ())
    return output.to(query.dtype)
