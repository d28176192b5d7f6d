"""Attention by one Triton kernel that takes any token tree from its intervals.

Per sequence the kernel is given 3 R numbers and the prefix, no mask. It reads keys and values where
they lie in the cache, once for all query heads that share them, and splits a long prefix over the
GPU's processors.

Refuses float64, values of another width than keys, heads of more than 256 numbers, and a CPU
without TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from decodekit.backends.layout import rows_in_one_piece
from decodekit.backends.triton.tiles import Tile, TileTuner, bucket_of_keys, bucket_of_pairs, tiles
from decodekit.errors import BackendError, require_at_least
from decodekit.interfaces.mask import TreeMask

__all__ = ["TritonBackend", "TritonConfig"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_SPLITS = 32


@dataclass(kw_only=True)
class TritonConfig:
    """Settings of ``backend=triton``.

    Attributes:
        splits: Parts that the keys are split into, merged afterwards; 0 chooses by the length of
            the prefix and the size of the GPU.
        tune: Whether to time a few sizes of tiles on the GPU, once for each kind of step. Without,
            they follow from the shapes alone, the same in every process.
    """

    name: str = "triton"
    splits: int = 0
    tune: bool = True

    def __post_init__(self) -> None:
        require_at_least(self.splits, 0, key="backend.splits")


@dataclass(frozen=True, slots=True)
class _Lowered:
    """The trees of a step.

    Attributes:
        times: [B, 3, R] in int32: entry time, exit time, position; -1 in rows that only pad.
        shapes: [B, 2] in int32: prefix and rows.
        keys: The most keys of a sequence.
        window: The sliding window, or None.
    """

    times: Tensor
    shapes: Tensor
    keys: int
    window: int | None


class TritonBackend:
    """One kernel for prefill, trees and batches.

    Args:
        config: Its settings.

    Raises:
        BackendError: triton is not installed.
    """

    name = "triton"

    def __init__(self, config: TritonConfig | None = None) -> None:
        self.config = config or TritonConfig()
        self._kernels = _load_kernels()

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Lowered:
        """Return the trees as small tensors; see ``MaskBuilder.lower``.

        Raises:
            BackendError: The kernel cannot run on ``device``, or not on ``dtype``.
        """
        if device.type != "cuda" and not self._kernels.INTERPRETED:
            raise BackendError(
                f"backend 'triton' needs a GPU, not {device.type}; use backend=sdpa, or set "
                "TRITON_INTERPRET=1 to run it in Python, for tests",
                backend=self.name,
            )
        if dtype not in _DTYPES:
            raise BackendError(
                "backend 'triton' takes float16, bfloat16 and float32, not "
                f"{str(dtype).removeprefix('torch.')}; use backend=sdpa",
                backend=self.name,
            )
        rows = max(mask.rows for mask in masks)
        times = [
            [
                [*values, *[-1] * (rows - mask.rows)]
                for values in (mask.tin, mask.tout, mask.positions)
            ]
            for mask in masks
        ]
        shapes = [[mask.prefix, mask.rows] for mask in masks]
        reach = max(max(mask.positions) for mask in masks)
        return _Lowered(
            times=torch.tensor(times, dtype=torch.int32, device=device),
            shapes=torch.tensor(shapes, dtype=torch.int32, device=device),
            keys=max(mask.prefix + mask.rows for mask in masks),
            window=None if window is None or reach < window else window,
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
        """Return the attention output [B, R, H, D]; see ``AttentionBackend.attend``."""
        self._check(query, value)
        query, key, value = (rows_in_one_piece(states) for states in (query, key, value))

        def run(tile: Tile) -> Tensor:
            return self._run(
                tile, query, key, value, lowered, scale=scale, softcap=softcap, sinks=sinks
            )

        heads, rows, width = query.shape[1:]
        pairs = rows * (heads // key.shape[1])
        tried = tiles(pairs, width, query.dtype)
        batch = (query.shape[0] - 1).bit_length()
        kind = (
            query.device, query.dtype, heads, key.shape[1], width, batch, bucket_of_pairs(pairs),
            bucket_of_keys(lowered.keys), self.config.splits, lowered.window is not None,
            softcap is not None, sinks is not None,
        )  # fmt: skip
        with _current(query.device):
            if self._kernels.INTERPRETED or not self.config.tune:
                return run(tried[0])
            return run(_tuner().best(kind, tried, run))

    def _run(
        self,
        tile: Tile,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lowered: _Lowered,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention output [B, R, H, D], computed in tiles of this size."""
        batch, heads, rows, width = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        blocks = _ceil(rows * groups, tile.pairs)
        splits = self.config.splits or _splits(
            lowered.keys, tile.keys, programs=blocks * batch * kv_heads, device=query.device
        )
        # Not more splits than there are blocks of keys; all but the last are full.
        chunk = _ceil(_ceil(lowered.keys, splits), tile.keys) * tile.keys
        splits = _ceil(lowered.keys, chunk)
        out = query.new_empty((batch, rows, heads, width))
        parts = logs = out
        if splits > 1:
            parts = out.new_empty((splits, *out.shape), dtype=torch.float32)
            logs = out.new_empty((splits, batch, rows, heads), dtype=torch.float32)
        sink_of = out if sinks is None else sinks.contiguous()  # a pointer that is not followed
        block_d = max(16, 1 << (width - 1).bit_length())
        self._kernels.attend_kernel[(blocks, batch * kv_heads, splits)](
            query,
            key,
            value,
            parts,
            logs,
            sink_of,
            lowered.times,
            lowered.shapes,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            kv_heads,
            rows,
            width,
            scale,
            softcap or 1.0,
            lowered.window or 0,
            chunk,
            GROUPS=groups,
            WINDOWED=lowered.window is not None,
            SOFTCAPPED=softcap is not None,
            SINKS=sinks is not None,
            SPLIT=splits > 1,
            # The interpreter's bfloat16 products are wrong, so there all are in float32.
            WIDE=self._kernels.INTERPRETED,
            BLOCK_M=tile.pairs,
            BLOCK_N=tile.keys,
            BLOCK_D=block_d,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            places = batch * rows * heads
            block_p = 64 if self._kernels.INTERPRETED else 4
            self._kernels.merge_kernel[(_ceil(places, block_p),)](
                parts,
                logs,
                sink_of,
                out,
                heads,
                width,
                places,
                splits,
                SINKS=sinks is not None,
                BLOCK_P=block_p,
                BLOCK_D=block_d,
                num_warps=4,
            )
        return out

    def _check(self, query: Tensor, value: Tensor) -> None:
        width = query.shape[-1]
        if width > 256:
            raise BackendError(
                f"backend 'triton' takes heads of up to 256 numbers, not {width}; use backend=sdpa",
                backend=self.name,
            )
        if value.shape[-1] != width:
            raise BackendError(
                f"backend 'triton' takes values as wide as keys, not {value.shape[-1]} and "
                f"{width}; use backend=eager",
                backend=self.name,
            )


def _load_kernels() -> ModuleType:
    try:
        from decodekit.backends.triton import kernels as triton_kernels
    except ImportError as error:
        raise BackendError(
            "backend 'triton' needs triton: pip install triton; or use backend=sdpa",
            backend="triton",
        ) from error
    return triton_kernels


@lru_cache(maxsize=1)
def _tuner() -> TileTuner:
    """Return the tuner, one for the process: two decoders must not choose differently."""
    from decodekit.backends.triton import timing as triton_timing

    return TileTuner(triton_timing.milliseconds_of, triton_timing.REFUSALS)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` current: Triton launches there, wherever the states are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _splits(keys: int, block_n: int, *, programs: int, device: torch.device) -> int:
    """Return how many parts to split ``keys`` into, so that ``programs`` fill the GPU twice."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = _ceil(2 * processors, programs)
    # A part of fewer than four blocks costs more to merge than it saves.
    return max(1, min(wanted, keys // (4 * block_n), _MAX_SPLITS))


def _ceil(number: int, by: int) -> int:
    return -(-number // by)
