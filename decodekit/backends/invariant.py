"""Attention whose result for a row depends neither on the other rows nor on where its keys lie.

The rows of a guessed tree lie in other places than the same tokens committed one by one, and fast
kernels add up a row's keys in an order that depends on places and on the number of rows. In half
precision the last bit of that sum decides now and then which way an element is rounded, and some
tokens later the text is another one. Here everything is added up in float64: what the order changes
there is some billion times smaller than a rounding step of half precision, so that in practice the
rounded results are the same bits. That reproducibility is a matter of kernels that do not depend on
the batch: He et al., "Defeating Nondeterminism in LLM Inference" (2025).

A long prompt is left to torch's kernel: its rows come in the same calls whatever is guessed below
it.

Shapes: B batch, H query heads, K kv heads, G = H / K, R rows, P prefix, L leading rows, S keys,
D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decodekit.errors import BackendError
from decodekit.mask import TreeMask, bool_to_additive, pad_masks

__all__ = ["InvariantBackend"]

_LONG = 16
"""More leading rows than this are a prompt."""

_BLOCK = 64
"""Rows whose float64 scores are held at once."""


@dataclass(frozen=True, slots=True)
class _Lead:
    """The rows of a prompt: how many, their keys, and their mask [L, S], None if it is causal."""

    rows: int
    keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Lowered:
    """For each sequence its prompt's rows, if any, and the mask [B, 1, R, S] to add in float64."""

    leads: tuple[_Lead | None, ...]
    mask: Tensor


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
        """Return the masks as an additive tensor, and which rows are a prompt's.

        See ``MaskBuilder.lower``.

        Raises:
            BackendError: The device has no float64.
        """
        if device.type == "mps":
            raise BackendError(
                "backend 'invariant' needs float64, which device 'mps' has not; use backend=sdpa",
                backend=self.name,
            )
        visible = pad_masks(list(masks), window=window, device=device)
        leads = tuple(
            _lead(mask, visible[index], window=window, dtype=dtype)
            for index, mask in enumerate(masks)
        )
        return _Lowered(leads, bool_to_additive(visible, torch.float64)[:, None])

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
        if softcap is not None or sinks is not None or not any(lowered.leads):
            return _exact(
                query, key, value, lowered.mask, scale=scale, softcap=softcap, sinks=sinks
            )
        outputs = []
        # One by one: a prompt's result must not depend on which others it is run with.
        for index, lead in enumerate(lowered.leads):
            at = slice(index, index + 1)
            rows = 0 if lead is None else lead.rows
            tail = _exact(
                query[at, :, rows:], key[at], value[at], lowered.mask[at, :, rows:], scale=scale
            )
            if lead is not None:
                head = scaled_dot_product_attention(
                    query[at, :, :rows],
                    key[at, :, : lead.keys],
                    value[at, :, : lead.keys],
                    attn_mask=lead.mask,
                    is_causal=lead.mask is None,
                    scale=scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                ).transpose(1, 2)
                tail = torch.cat([head, tail], dim=1)
            outputs.append(tail)
        return torch.cat(outputs)


def _lead(
    mask: TreeMask, visible: Tensor, *, window: int | None, dtype: torch.dtype
) -> _Lead | None:
    """Return the prompt's rows of one sequence whose mask is ``visible`` [R, S]."""
    rows = mask.lead
    if rows <= _LONG:
        return None
    keys = mask.prefix + rows
    causal = mask.prefix == 0 and (window is None or rows <= window)
    return _Lead(
        rows, keys, None if causal else bool_to_additive(visible[:rows, :keys].clone(), dtype)
    )


def _exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output [B, R, H, D], added up in float64, block of rows by block."""
    batch, heads, rows, _ = query.shape
    key, value = key.to(torch.float64), value.to(torch.float64)
    output = query.new_empty((batch, rows, heads, value.shape[-1]))
    for start in range(0, rows, _BLOCK):
        at = slice(start, start + _BLOCK)
        output[:, at] = _block(
            query[:, :, at], key, value, mask[:, :, at], scale=scale, softcap=softcap, sinks=sinks
        )
    return output


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the output [B, R, H, D] of some rows for keys and values in float64."""
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
    weights = scores_BHRS.softmax(dim=-1)[..., : key.shape[2]]
    out = weights.reshape(batch, kv_heads, -1, key.shape[2]) @ value
    return out.view(batch, heads, rows, -1).transpose(1, 2)
