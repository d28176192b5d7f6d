"""Attention by ``torch.nn.attention.flex_attention``: the tree as a function of row and key.

What the function looks at are small tensors of intervals and positions, so a step brings other
numbers and no other code. Row and key counts are rounded up to few sizes, for each size is compiled
once.

Refuses, when compiled for a CPU, sinks and float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from decodekit.backends.merge import merge_parts
from decodekit.errors import BackendError, in_one_line
from decodekit.interfaces.mask import TreeMask

__all__ = ["FlexBackend"]

_BLOCK = 128  # rows and keys of a block of flex_attention's own
_LEAST_ROWS = 16
_LEAST_KEYS = 256
_NO_WINDOW = 2**31 - 1
_MOST_SIZES = 256  # torch stops compiling one function anew after 8 times


@dataclass(frozen=True, slots=True)
class _Lowered:
    """The trees of a step.

    Attributes:
        blocks: Which blocks of keys are looked at, and who sees whom in them.
        rows: R, rounded up.
        keys: S, rounded up.
    """

    blocks: BlockMask
    rows: int
    keys: int


class FlexBackend:
    """Compiled by torch for whatever device it is on.

    Args:
        compiled: Whether to compile the kernel.
    """

    name = "flex"

    def __init__(self, *, compiled: bool = True) -> None:
        self.compiled = compiled

    def key_rows(self, rows: int) -> int:
        """Return the number of rows that keys and values should have; see ``AttentionBackend``."""
        return _rounded(rows, _LEAST_KEYS)

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Lowered:
        """Return the masks as a function and the blocks of keys it matters for.

        See ``MaskBuilder.lower``.

        Raises:
            BackendError: ``dtype`` cannot be compiled for ``device``.
        """
        if self.compiled and device.type == "cpu" and dtype == torch.float64:
            raise BackendError(
                "backend 'flex' is not compiled for float64 on a CPU; use backend.compile=false "
                "or backend=sdpa",
                backend=self.name,
            )
        rows = _rounded(max(mask.rows for mask in masks), _LEAST_ROWS)
        keys = self.key_rows(max(mask.prefix + mask.rows for mask in masks))
        # Rows that pad are the last row again, so that none sees nothing.
        times = torch.tensor(
            [
                [
                    [*values, *[values[-1]] * (rows - mask.rows)]
                    for values in (mask.tin, mask.tout, mask.positions)
                ]
                for mask in masks
            ],
            dtype=torch.int32,
            device=device,
        )
        shapes = torch.tensor(
            [[mask.prefix, mask.rows, min(window or _NO_WINDOW, _NO_WINDOW)] for mask in masks],
            dtype=torch.int32,
            device=device,
        )
        first, full, last = zip(*(_block_runs(mask, window) for mask in masks), strict=True)
        across = -(-rows // _BLOCK)
        blocks = BlockMask.from_kv_blocks(
            *_listed(full, last, across, keys, device),
            *_listed(first, full, across, keys, device),
            BLOCK_SIZE=(_BLOCK, _BLOCK),
            mask_mod=_tree_mask(times, shapes),
            seq_lengths=(rows, keys),
        )
        return _Lowered(blocks, rows, keys)

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
        if sinks is not None and self.compiled and query.device.type == "cpu":
            raise BackendError(
                "backend 'flex' cannot do attention sinks when compiled for a CPU; "
                "use backend.compile=false or backend=eager",
                backend=self.name,
            )
        rows, dtype = query.shape[2], query.dtype
        states = [_of_length(query, lowered.rows)]
        states += [_of_length(x, lowered.keys) for x in (key, value)]
        if not self.compiled:  # it would round the scores to the dtype of the states
            states = [x.to(torch.promote_types(dtype, torch.float32)) for x in states]
        options: dict[str, Any] = {
            "score_mod": None if softcap is None else _softcap(softcap),
            "block_mask": lowered.blocks,
            "scale": scale,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        output: Tensor
        if sinks is not None:
            part = self._run(states, **options, return_lse=True)
            output = merge_parts([part], sinks)
        else:
            output = self._run(states, **options)
        return output[:, :, :rows].to(dtype).transpose(1, 2)

    def _run(self, states: Sequence[Tensor], **options: Any) -> Any:
        if not self.compiled:
            plain: Callable[..., Any] = flex_attention
            with warnings.catch_warnings():  # that it is not compiled is what was asked for
                warnings.simplefilter("ignore")
                return plain(*states, **options)
        try:
            with torch._dynamo.config.patch(
                recompile_limit=_MOST_SIZES, accumulated_recompile_limit=_MOST_SIZES
            ):
                return _compiled()(*states, **options)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            inner = getattr(error, "inner_exception", error)
            reason = in_one_line(inner)[:200]
            raise BackendError(
                f"backend 'flex' cannot be compiled here ({reason}); use backend.compile=false "
                "or backend=sdpa",
                backend=self.name,
            ) from error


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    """Return the compiled kernel, one for the process: its sizes are kept by torch."""
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def _tree_mask(times: Tensor, shapes: Tensor) -> Callable[..., Tensor]:
    """Return whether row ``q`` sees key ``k``, for scalars or for whatever torch makes of them.

    Args:
        times: [B, 3, R]: entry time, exit time, position.
        shapes: [B, 3]: prefix, rows, window.
    """
    most = times.shape[2] - 1

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        tail = k - shapes[b, 0]
        row = tail.clamp(0, most)
        moment = times[b, 0, q]
        on_path = (times[b, 0, row] <= moment) & (moment < times[b, 1, row])
        there = (tail < 0) | (on_path & (tail < shapes[b, 1]))
        position = torch.where(tail < 0, k, times[b, 2, row])
        return there & (times[b, 2, q] - position < shapes[b, 2])

    return sees


def _softcap(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _block_runs(mask: TreeMask, window: int | None) -> tuple[int, int, int]:
    """Return the first block of keys that is seen, the end of those seen whole, and of all."""
    end = -(-(mask.prefix + mask.rows) // _BLOCK)
    if window is None or max(mask.positions) < window:
        return 0, mask.prefix // _BLOCK, end
    early = min(max(min(mask.positions) - window + 1, 0), mask.prefix)
    return early // _BLOCK, early // _BLOCK, end


def _listed(
    starts: Sequence[int], ends: Sequence[int], across: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ``BlockMask``'s form of one run of blocks per sequence: counts and indices.

    Args:
        starts: The first block of each sequence's run.
        ends: The block after its last.
        across: Blocks of rows, which all look at the same keys.
        keys: S, for the number of indices.
        device: Where to.
    """
    total = keys // _BLOCK
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    # Indices behind the count are not looked at; every block stands once, as torch's own do.
    indices = [[(start + number) % total for number in range(total)] for start in starts]
    shape = (len(starts), 1, across)
    count = torch.tensor(counts, dtype=torch.int32, device=device)
    index = torch.tensor(indices, dtype=torch.int32, device=device)
    return (
        count[:, None, None].expand(shape).contiguous(),
        index[:, None, None, :].expand(*shape, total).contiguous(),
    )


def _rounded(number: int, least: int) -> int:
    """Return the smallest of ``least``, 2 x ``least``, 4 x ``least``, ... that is large enough."""
    return int(least << max(0, (-(-number // least) - 1).bit_length()))


def _of_length(states: Tensor, length: int) -> Tensor:
    """Return ``states`` [B, H, N, D] with N = ``length``: a view, or a copy if rows are missing."""
    missing = length - states.shape[2]
    return states[:, :, :length] if missing <= 0 else pad(states, (0, 0, 0, missing))
