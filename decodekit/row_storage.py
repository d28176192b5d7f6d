"""The memory of a key-value cache: preallocated, rows written and kept in place.

A forward pass writes its rows behind the committed ones, attention reads views, and ``commit``
moves the accepted rows of all layers with one gather per slab. Nothing grows with the context.

Shapes: N layers' keys or values, B batch, b sequences that are left of it, K kv heads, C capacity,
D head dim, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decodekit.errors import GenerationError
from decodekit.execution.huge_pages import ask_for_huge_pages

__all__ = ["RowStorage"]


class RowStorage:
    """Rows of B sequences, in slabs [N, B, K, C, D] that are written and moved alike.

    Args:
        batch: B.
        capacity: C, scratch rows included.
        key_rows: The backend's, if it has one; see ``AttentionBackend``. Rounds up the length of
            the views that attention reads.
        spare: Rows in memory behind those of the capacity; nothing here touches them.

    Attributes:
        slabs: What ``add_slab`` has made.
        lengths: Committed rows of each sequence that is left, length b.
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
        self._ends: tuple[int, ...] = ()  # where the rows of the pass under way end

    @property
    def memory_rows(self) -> int:
        """C as it is in memory, rounded up and with the spare rows."""
        return self._key_rows(self.capacity) + self.spare

    def add_slab(
        self, count: int, *, heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Take memory for ``count`` layers' keys or values and return it, [N, B, K, C, D].

        Raises:
            GenerationError: There is not enough memory; nothing was taken.
        """
        shape = (count, self.batch, heads, self.memory_rows, dim)
        try:
            slab = torch.empty(shape, dtype=dtype, device=device)
            ask_for_huge_pages(slab)
            # Padded rows of a ragged batch are masked, but 0 * NaN would be NaN.
            slab.zero_()
        except (RuntimeError, MemoryError) as error:
            raise GenerationError(
                f"no memory for a cache of {self.capacity} rows; "
                "lower max_new_tokens or shorten the prompt"
            ) from error
        self.slabs.append(slab)
        return slab

    def begin(self, rows: Sequence[int]) -> None:
        """Make ready for a pass that writes so many rows behind each sequence.

        Raises:
            GenerationError: They do not fit.
        """
        for length, count in zip(self.lengths, rows, strict=True):
            if length + count > self.capacity:
                raise GenerationError(
                    f"{count} rows do not fit behind {length} in a cache of {self.capacity} rows"
                )
        self._ends = tuple(map(sum, zip(self.lengths, rows, strict=True)))

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
        """Forget every row; all sequences are there again, and the memory stays."""
        self.lengths = [0] * self.batch
