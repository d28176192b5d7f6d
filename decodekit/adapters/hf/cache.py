"""A key-value cache for ``transformers`` models: preallocated, rows written and kept in place.

``transformers``' own dynamic cache concatenates every layer at every step and can only be cropped.
Here a forward pass writes its rows behind the committed ones, attention reads views, and ``commit``
moves the accepted rows of all layers with one gather.

Shapes: L layers, B batch, K kv heads, C capacity, D head dim, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decodekit.errors import GenerationError

__all__ = ["HFCache"]


class _Slab:
    """The keys or values of all layers of one shape, [L, B, K, C, D], in one allocation."""

    def __init__(self, *, layers: int, batch: int, capacity: int, states: Tensor) -> None:
        _, heads, _, dim = states.shape
        # Zeros, not empty: padded rows of a ragged batch are masked, but 0 * NaN would be NaN.
        self.data = states.new_zeros((layers, batch, heads, capacity, dim))

    def fits(self, states: Tensor) -> bool:
        """Return whether ``states`` [B, K, R, D] belong to a layer of this slab."""
        _, _, heads, _, dim = self.data.shape
        return (
            (states.shape[1], states.shape[3]) == (heads, dim)
            and states.dtype == self.data.dtype
            and states.device == self.data.device
        )


class _Storage:
    """What the layers of a cache share. It does not know them, so that memory is let go at once.

    Args:
        layers: L.
        batch: B.
        capacity: C.
        key_rows: Rounds the length of the views that attention reads.
    """

    def __init__(
        self, *, layers: int, batch: int, capacity: int, key_rows: Callable[[int], int]
    ) -> None:
        self.layers = layers
        self.batch = batch
        self.capacity = capacity
        self.key_rows = key_rows
        self.lengths = [0] * batch
        self.ends: tuple[int, ...] = ()  # where the rows of the pass under way end
        self.slabs: dict[str, list[_Slab]] = {"keys": [], "values": []}

    def every_slab(self) -> tuple[_Slab, ...]:
        """Return the slabs of keys and of values."""
        return (*self.slabs["keys"], *self.slabs["values"])

    def allocate(self, kind: str, layer: int, states: Tensor) -> Tensor:
        """Return the storage [B, K, C, D] of ``layer``, shaped and placed like ``states``.

        Raises:
            GenerationError: There is not enough memory; the cache is empty as before.
        """
        slabs = self.slabs[kind]
        for slab in slabs:
            if slab.fits(states):
                return slab.data[layer]
        try:
            slabs.append(
                _Slab(
                    layers=self.layers,
                    batch=self.batch,
                    capacity=self.key_rows(self.capacity),
                    states=states,
                )
            )
        except (RuntimeError, MemoryError) as error:
            raise GenerationError(
                f"no memory for a cache of {self.capacity} rows; "
                "lower max_new_tokens or shorten the prompt"
            ) from error
        return slabs[-1].data[layer]


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # untyped base
    """One layer's view of the slabs, in the form that ``transformers`` models call."""

    is_sliding = False  # windows are the mask's business: every row is kept
    is_croppable = False

    def __init__(self, storage: _Storage, index: int) -> None:
        super().__init__()
        self._storage = storage
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take this layer's share of the slabs; the first forward pass tells the shapes."""
        self.keys = self._storage.allocate("keys", self._index, key_states)
        self.values = self._storage.allocate("values", self._index, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows [B, K, R, D] behind the committed ones; return all rows so far.

        What lies behind them in a rounded view is zeros, or rows of earlier passes.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        # Rows that only pad a sequence to the widest are not written: there may be no room.
        starts, ends = self._storage.lengths, self._storage.ends
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            self.keys[index, :, start:end] = key_states[index, :, : end - start]
            self.values[index, :, start:end] = value_states[index, :, : end - start]
        batch, end = len(ends), self._storage.key_rows(max(ends))
        return self.keys[:batch, :, :end], self.values[:batch, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a pass of ``query_length`` rows sees, and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of committed rows of the longest sequence."""
        return max(self._storage.lengths)

    def get_max_length(self) -> int:
        """Return the capacity in rows."""
        return self._storage.capacity


def _as_it_is(rows: int) -> int:
    return rows


class HFCache(Cache):  # type: ignore[misc]  # untyped base
    """The ``KVCache`` of the ``hf`` adapter, which is also a ``transformers`` cache.

    Args:
        layers: L, the model's number of layers.
        batch: B, the number of sequences.
        capacity: C, rows per sequence, scratch rows included. Memory is taken at the first pass.
        key_rows: The backend's, if it has one; see ``AttentionBackend``.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        capacity: int,
        key_rows: Callable[[int], int] | None = None,
    ) -> None:
        storage = _Storage(
            layers=layers, batch=batch, capacity=capacity, key_rows=key_rows or _as_it_is
        )
        super().__init__(layers=[_Layer(storage, index) for index in range(layers)])
        self._storage = storage

    @property
    def capacity(self) -> int:
        """Rows per sequence that there is room for, scratch rows included."""
        return self._storage.capacity

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed rows of each sequence, length B."""
        return tuple(self._storage.lengths)

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
        self._storage.ends = tuple(map(sum, zip(self.lengths, rows, strict=True)))

    @torch.inference_mode()
    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep, for each sequence, these rows of the last pass, in this order; drop the rest."""
        lengths = self._storage.lengths
        for index, keep in enumerate(rows):
            start = lengths[index]
            # A leading run is in place already; only what follows a gap has to move.
            still = next((i for i, row in enumerate(keep) if row != i), len(keep))
            moved = [start + row for row in keep[still:]]
            if moved:
                for slab in self._storage.every_slab():
                    data = slab.data[:, index]
                    source = torch.tensor(moved, device=data.device)
                    # index_select copies, so overlapping rows are safe in any order.
                    data[:, :, start + still : start + len(keep)] = data.index_select(2, source)
            lengths[index] = start + len(keep)

    @torch.inference_mode()
    def keep(self, sequences: Sequence[int]) -> None:
        """Let go of all sequences but these, ascending; they are numbered anew from 0."""
        lengths = self._storage.lengths
        for new, old in enumerate(sequences):
            length = lengths[old]
            if new != old:
                for slab in self._storage.every_slab():
                    slab.data[:, new, :, :length] = slab.data[:, old, :, :length]
            lengths[new] = length
        del lengths[len(sequences) :]

    def reset(self) -> None:
        """Forget every row; all sequences are there again, and the memory stays."""
        self._storage.lengths = [0] * self._storage.batch
