"""The key-value cache of the ``llama`` adapter: all layers' keys and values in one allocation.

Shapes: L layers, B batch, b sequences that are left of it, K kv heads, C rows in memory, D head
dim, R rows, S the longest sequence with its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.adapters.cache_memory import RowStorage
from decodekit.adapters.execution.graphs import Recordings
from decodekit.errors import GenerationError

__all__ = ["LlamaCache"]


class LlamaCache:
    """The ``KVCache`` of the ``llama`` adapter; memory is taken by passes, as ``RowStorage`` does.

    Args:
        layers: L.
        heads: K.
        dim: D.
        batch: B.
        capacity: Rows per sequence, scratch rows included.
        dtype: Of keys and values.
        device: Theirs.
        key_rows: The backend's, if it has one; see ``AttentionBackend``.
        spare: Rows in memory behind those of the capacity, for what nobody reads; with them memory
            is taken at once and stays where it is.

    Attributes:
        layers: L.
        recordings: Passes that were recorded over this memory.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        dim: int,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        key_rows: Callable[[int], int] | None = None,
        spare: int = 0,
    ) -> None:
        self._storage = RowStorage(batch=batch, capacity=capacity, key_rows=key_rows, spare=spare)
        self.layers, self._heads, self._dim = layers, heads, dim
        self.recordings: Recordings[Any] = Recordings()
        self.dtype, self.device = dtype, device
        self._slab: Tensor | None = None  # [2 L, B, K, C, D]: a layer's keys, then its values
        self._places: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    @property
    def capacity(self) -> int:
        """Rows per sequence that there is room for, scratch rows included."""
        return self._storage.capacity

    @property
    def memory_rows(self) -> int:
        """C, the rows per sequence that there is memory for, spare ones included."""
        return self._storage.memory_rows

    @property
    def has_spare(self) -> bool:
        """Whether there are spare rows."""
        return self._storage.spare > 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed rows of each sequence, length b."""
        return tuple(self._storage.lengths)

    def suit(
        self, shape: tuple[int, int, int], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Follow a model that was changed between two texts; memory is taken anew.

        Args:
            shape: L, K and D.
            dtype: Of keys and values.
            device: Theirs.

        Raises:
            GenerationError: There are rows already, so it was in the middle of a text.
        """
        before = (self.layers, self._heads, self._dim)
        if (shape, dtype, device) == (before, self.dtype, self.device):
            return
        if any(self.lengths):
            changed = (
                f"cast or moved in the middle of a text, from {self.dtype} on {self.device} to "
                f"{dtype} on {device}"
                if shape == before
                else "given other layers or heads in the middle of a text"
            )
            raise GenerationError(f"the model was {changed}; start the text anew")
        self.layers, self._heads, self._dim = shape
        self.dtype, self.device = dtype, device
        self._slab = None
        self._storage.slabs.clear()

    def begin(self, rows: Sequence[int]) -> None:
        """Make ready for a pass that writes so many rows behind each sequence.

        Raises:
            GenerationError: They do not fit, or there is no memory for the cache.
        """
        self._storage.begin(rows)
        if self._slab is None:
            self._slab = self._storage.add_slab(
                2 * self.layers,
                heads=self._heads,
                dim=self._dim,
                dtype=self.dtype,
                device=self.device,
            )
        self._slab = self._storage.slabs[0]  # it may have moved
        self._places = None  # a recorded pass needs none

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's rows [b, K, R, D]; return views of all rows so far, [b, K, S, D]."""
        assert self._slab is not None, "begin() comes first"
        if len(self.lengths) == 1:
            if self._places is None:
                self._places = self._storage.places(self._slab)
            written, read = self._places
            written[2 * layer].copy_(keys[0])
            written[2 * layer + 1].copy_(values[0])
            return read[2 * layer], read[2 * layer + 1]
        storage, slab = self._storage, self._slab
        return storage.write(slab[2 * layer], keys), storage.write(slab[2 * layer + 1], values)

    @property
    def memory(self) -> Tensor:
        """All of it, [2 L, B, K, C, D]: a layer's keys, then its values; ``begin`` comes first."""
        assert self._slab is not None, "begin() comes first"
        return self._slab

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, [B, K, C, D]: views of all the memory."""
        assert self._slab is not None, "begin() comes first"
        return self._slab[2 * layer], self._slab[2 * layer + 1]

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep, for each sequence, these rows of the last pass, in this order; drop the rest."""
        self._storage.commit(rows)

    def keep(self, sequences: Sequence[int]) -> None:
        """Let go of all sequences but these, ascending; they are numbered anew from 0."""
        self._storage.keep(sequences)

    def repeat(self, sequences: Sequence[int]) -> None:
        """Go on with copies of these sequences, each ``sequences[i] <= i``; see ``HasRepeat``."""
        self._storage.repeat(sequences)

    def reset(self) -> None:
        """Forget every row; all sequences are there again, and the memory stays."""
        self._storage.reset()
