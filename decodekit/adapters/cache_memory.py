"""The memory of a key-value cache: taken in large pieces, rows written and kept in place.

A forward pass writes its rows behind the committed ones, attention reads views, and ``commit``
moves the accepted rows of all layers with one gather per slab. Memory is taken for what a text
needs and not for the longest that it may become: 1,024 rows first, and half as much again whenever
it is full. So at the end twice as many rows as there are were copied at most.

Shapes: N layers' keys or values, B batch, b sequences that are left of it, K kv heads, C rows that
there is memory for, D head dim, R rows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from decodekit.adapters.execution.huge_pages import ask_for_huge_pages
from decodekit.errors import GenerationError

__all__ = ["RowStorage"]

_FIRST = 1024  # rows: 23 MB of SmolLM2-135M in bfloat16, 128 MB of an 8B LLaMA
_STEP = 256
_WASTE = 4  # memory of more than so many times the rows of a text is let go after it


class RowStorage:
    """Rows of B sequences, in slabs [N, B, K, C, D] that are written and moved alike.

    Args:
        batch: B.
        capacity: The rows of a sequence at most, scratch rows included.
        key_rows: The backend's, if it has one; see ``AttentionBackend``. Rounds up the length of
            the views that attention reads.
        spare: Rows in memory behind those of the capacity; nothing here touches them. With them
            memory is taken for the whole capacity at once, and stays where it is.

    Attributes:
        slabs: What ``add_slab`` has made. ``begin`` may put others in their place.
        lengths: Committed rows of each sequence that is left, length b.
        moves: How often that happened.
    """

    def __init__(
        self,
        *,
        batch: int,
        capacity: int,
        key_rows: Callable[[int], int] | None = None,
        spare: int = 0,
    ) -> None:
        self.batch = batch
        self.capacity = capacity
        self.spare = spare
        self._key_rows = key_rows or (lambda rows: rows)
        self.lengths = [0] * batch
        self.slabs: list[Tensor] = []
        self.moves = 0
        self._room = 0  # rows that there is memory for, the spare ones left out
        self._used = 0  # the most rows of this text, or of the last one
        self._ends: tuple[int, ...] = ()  # where the rows of the pass under way end

    @property
    def memory_rows(self) -> int:
        """C, rounded up and with the spare rows."""
        return self._key_rows(self._room) + self.spare

    def add_slab(
        self, count: int, *, heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Take memory for ``count`` layers' keys or values and return it, [N, B, K, C, D].

        ``begin`` comes first: it says for how many rows.

        Raises:
            GenerationError: There is not enough memory, or could never be enough for the whole
                capacity; nothing was taken.
        """
        whole = (count, self.batch, heads, self._key_rows(self.capacity) + self.spare, dim)
        shape = (*whole[:3], self.memory_rows, dim)
        with _explained(self.capacity):
            if shape != whole:
                _check_possible(whole, dtype=dtype, device=device)
            slab = _zeros(shape, dtype=dtype, device=device)
        self.slabs.append(slab)
        return slab

    def begin(self, rows: Sequence[int]) -> None:
        """Make ready for a pass that writes so many rows behind each sequence.

        Raises:
            GenerationError: They do not fit, or there is no memory for them.
        """
        for length, count in zip(self.lengths, rows, strict=True):
            if length + count > self.capacity:
                raise GenerationError(
                    f"{count} rows do not fit behind {length} in a cache of {self.capacity} rows"
                )
        self._ends = tuple(map(sum, zip(self.lengths, rows, strict=True)))
        self._make_room(max(self._ends))

    def _make_room(self, rows: int) -> None:
        """Have memory for so many rows of a sequence, and not for far more than a text needs."""
        if self.spare:
            self._room = self.capacity
        elif rows > self._room:
            more = max(rows, _FIRST, self._room + self._room // 2)
            self._move(min(-(-more // _STEP) * _STEP, self.capacity))
        elif not any(self.lengths) and self._room > max(_FIRST, _WASTE * max(self._used, rows)):
            self._move(min(max(rows, _FIRST), self.capacity))
        self._used = max(self._used, rows) if any(self.lengths) else rows

    @torch.no_grad()
    def _move(self, room: int) -> None:
        """Move what is committed to memory for ``room`` rows of each sequence."""
        kept = max(self.lengths)
        with _explained(room):
            moved = []
            for slab in self.slabs:
                shape = (*slab.shape[:3], self._key_rows(room), slab.shape[4])
                moved.append(_zeros(shape, dtype=slab.dtype, device=slab.device))
                moved[-1][:, :, :, :kept] = slab[:, :, :, :kept]
        self.slabs[:] = moved
        self._room = room
        self.moves += 1

    def places(self, slab: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return, for a pass of one sequence, where all entries of a slab are written and read.

        Many views at once take a fraction of the time that they take one by one.

        Returns:
            The rows of the pass, N times [K, R, D], and all rows so far, N times [1, K, S, D].
        """
        ((start, end),) = zip(self.lengths, self._ends, strict=True)
        written = slab[:, 0, :, start:end].unbind(0)
        return written, slab[:, :1, :, : self._key_rows(end)].unbind(0)

    def write(self, place: Tensor, states: Tensor) -> Tensor:
        """Write the rows of a pass behind the committed ones.

        Args:
            place: [B, K, C, D], one entry of a slab.
            states: [b, K, R, D].

        Returns:
            All rows so far, [b, K, S, D] with S of the longest sequence, rounded: a view.
        """
        # Rows that only pad a sequence to the widest are not written: there may be no room.
        for index, (start, end) in enumerate(zip(self.lengths, self._ends, strict=True)):
            place[index, :, start:end] = states[index, :, : end - start]
        return place[: len(self._ends), :, : self._key_rows(max(self._ends))]

    @torch.inference_mode()
    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep, for each sequence, these rows of the last pass, in this order; drop the rest."""
        for index, keep in enumerate(rows):
            start = self.lengths[index]
            # A leading run is in place already; only what follows a gap has to move.
            still = next((i for i, row in enumerate(keep) if row != i), len(keep))
            moved = [start + row for row in keep[still:]]
            if moved:
                for slab in self.slabs:
                    data = slab[:, index]
                    source = torch.tensor(moved, device=data.device)
                    # index_select copies, so overlapping rows are safe in any order.
                    data[:, :, start + still : start + len(keep)] = data.index_select(2, source)
            self.lengths[index] = start + len(keep)

    @torch.inference_mode()
    def keep(self, sequences: Sequence[int]) -> None:
        """Let go of all sequences but these, ascending; they are numbered anew from 0."""
        for new, old in enumerate(sequences):
            length = self.lengths[old]
            if new != old:
                for slab in self.slabs:
                    slab[:, new, :, :length] = slab[:, old, :, :length]
            self.lengths[new] = length
        del self.lengths[len(sequences) :]

    @torch.inference_mode()
    def repeat(self, sequences: Sequence[int]) -> None:
        """Go on with copies of these sequences, each ``sequences[i] <= i``; see ``HasRepeat``."""
        # From the last on: no sequence comes from one behind it, so none is overwritten too early.
        for new, old in reversed(list(enumerate(sequences))):
            if new != old:
                for slab in self.slabs:
                    slab[:, new, :, : self.lengths[old]] = slab[:, old, :, : self.lengths[old]]
        self.lengths = [self.lengths[old] for old in sequences]

    def reset(self) -> None:
        """Forget every row; all sequences are there again.

        The memory stays for the next text. If that uses less than a quarter of it, and it holds
        more than 1,024 rows, the text after it gets less.
        """
        self.lengths = [0] * self.batch


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory in huge pages. Rows that pad are masked, but 0 * NaN would be NaN."""
    slab = torch.empty(shape, dtype=dtype, device=device)
    ask_for_huge_pages(slab)
    return slab.zero_()


def _check_possible(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> None:
    """Raise an error if a device could not hold such a tensor, even with nothing else on it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cuda":
        if size > torch.cuda.get_device_properties(device).total_memory:
            raise MemoryError
    elif device.type == "cpu" and hasattr(mmap, "MAP_PRIVATE"):
        # The system refuses what it does not have; what nobody writes to costs nothing.
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()


@contextmanager
def _explained(rows: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:
        raise GenerationError(
            f"no memory for a cache of {rows} rows; lower max_new_tokens or shorten the prompt"
        ) from error
