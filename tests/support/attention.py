"""What tests of attention backends share: tolerances, random states, one call from end to end."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit.interfaces import AttentionBackend
from decodekit.interfaces.mask import TreeMask

__all__ = [
    "HALF_AND_SINGLE",
    "NEEDS_TRITON",
    "TOLERANCES",
    "assert_close",
    "attend",
    "random_states",
]

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

TOLERANCES = {
    # dtype: (atol, rtol), for values of size about 1; docs/backends.md says the same
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-6, 2e-5),
    torch.float16: (2e-3, 2e-2),
    torch.bfloat16: (2e-2, 2e-2),
}
HALF_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


def random_states(
    masks: Sequence[TreeMask],
    layout: tuple[int, int],
    dtype: torch.dtype,
    seed: int = 0,
    *,
    dim: int,
    spare: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [B, H, R, D], key and value [B, K, S, D] for a batch, padded to the widest.

    Keys and values are views of a cache with ``spare`` more rows.
    """
    heads, kv_heads = layout
    batch = len(masks)
    rows = max(mask.rows for mask in masks)
    keys = max(mask.prefix + mask.rows for mask in masks)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        normal(batch, heads, rows, dim),
        normal(batch, kv_heads, keys + spare, dim)[:, :, :keys],
        normal(batch, kv_heads, keys + spare, dim)[:, :, :keys],
    )


def attend(
    backend: AttentionBackend,
    masks: Sequence[TreeMask],
    states: tuple[Tensor, Tensor, Tensor],
    *,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """Lower and attend; the scale is that of most models unless ``options`` have another."""
    query = states[0]
    lowered = backend.lower(masks, window=window, dtype=query.dtype, device=query.device)
    return backend.attend(*states, lowered, **{"scale": query.shape[-1] ** -0.5, **options})


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Check dtype, shape and values, within the tolerance of ``dtype``."""
    atol, rtol = TOLERANCES[dtype]
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)
