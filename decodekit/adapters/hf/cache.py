"""A key-value cache for ``transformers`` models over memory that is taken in large pieces.

``transformers``' own dynamic cache concatenates every layer at every step and can only be cropped;
see ``decodekit.adapters.cache_memory`` for what is done here.

Shapes: L layers, B batch, K kv heads, C rows in memory, D head dim, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decodekit.adapters.cache_memory import RowStorage
from decodekit.errors import GenerationError

__all__ = ["HFCache"]


class _Storage(RowStorage):
    """What the layers of a cache share. It does not know them, so that memory is let go at once.

    Args:
        layers: L.
        batch: B.
        capacity: The rows of a sequence at most.
        key_rows: Rounds the length of the views that attention reads.
    """

    def __init__(
        self, *, layers: int, batch: int, capacity: int, key_rows: Callable[[int], int] | None
    ) -> None:
        super().__init__(batch=batch, capacity=capacity, key_rows=key_rows)
        self.layers = layers
        self._kinds: dict[str, list[int]] = {"keys": [], "values": []}

    def allocate(self, kind: str, states: Tensor) -> int:
        """Return which slab holds entries [B, K, C, D] that are shaped and placed like ``states``.

        Raises:
            GenerationError: There is not enough memory; the cache is empty as before.
        """
        _, heads, _, dim = states.shape
        for place in self._kinds[kind]:
            slab = self.slabs[place]
            if (
                (slab.shape[2], slab.shape[4]) == (heads, dim)
                and slab.dtype == states.dtype
                and slab.device == states.device
            ):
                return place
        self.add_slab(self.layers, heads=heads, dim=dim, dtype=states.dtype, device=states.device)
        self._kinds[kind].append(len(self.slabs) - 1)
        return len(self.slabs) - 1

    def let_go(self, *, layers: int) -> None:
        """Forget all memory; the next pass takes some for so many layers."""
        self.layers = layers
        self.slabs.clear()
        for slabs in self._kinds.values():
            slabs.clear()


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # untyped base
    """One layer's view of the slabs, in the form that ``transformers`` models call."""

    is_sliding = False  # windows are the mask's business: every row is kept
    is_croppable = False

    def __init__(self, storage: _Storage, index: int) -> None:
        super().__init__()
        self._storage = storage
        self._index = index
        self._slabs: tuple[int, int] = (0, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take this layer's share of the slabs; the first forward pass tells the shapes."""
        self._slabs = (
            self._storage.allocate("keys", key_states),
            self._storage.allocate("values", value_states),
        )
        self.is_initialized = True
        self.follow()

    def follow(self) -> None:
        """Look at the slabs where they are now."""
        if self.is_initialized:
            keys, values = (self._storage.slabs[place] for place in self._slabs)
            self.keys, self.values = keys[self._index], values[self._index]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows [B, K, R, D] behind the committed ones; return all rows so far.

        What lies behind them in a rounded view is zeros, or rows of earlier passes.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self._is_of_another(key_states):
            if any(self._storage.lengths):
                raise GenerationError(
                    "the model was cast or moved in the middle of a text; start the text anew"
                )
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        keys = self._storage.write(self.keys, key_states)
        return keys, self._storage.write(self.values, value_states)

    def _is_of_another(self, states: Tensor) -> bool:
        assert self.keys is not None
        return (self.keys.dtype, self.keys.device) != (states.dtype, states.device)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a pass of ``query_length`` rows sees, and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of committed rows of the longest sequence."""
        return max(self._storage.lengths)

    def get_max_length(self) -> int:
        """Return the capacity in rows."""
        return self._storage.capacity


class HFCache(Cache):  # type: ignore[misc]  # untyped base
    """The ``KVCache`` of the ``hf`` adapter, which is also a ``transformers`` cache.

    Args:
        layers: L, the model's number of layers.
        batch: B, the number of sequences.
        capacity: Rows per sequence, scratch rows included. Memory is taken by passes, as
            ``RowStorage`` does.
        key_rows: The backend's, if it has one; see ``AttentionBackend``.

    Attributes:
        running: The tokens of the pass under way, where LongRoPE needs them.
        texts: The committed tokens of each sequence, likewise.
        is_long: Whether its keys are those of a long text, for LongRoPE.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        capacity: int,
        key_rows: Callable[[int], int] | None = None,
    ) -> None:
        storage = _Storage(layers=layers, batch=batch, capacity=capacity, key_rows=key_rows)
        super().__init__(layers=[_Layer(storage, index) for index in range(layers)])
        self._storage = storage
        self._made_for: object = None
        self._forget()

    def _forget(self) -> None:
        self.texts: list[list[int]] = [[] for _ in self._storage.lengths]
        self.running: Sequence[Sequence[int]] = ()
        self.is_long = [False] * len(self.texts)

    @property
    def capacity(self) -> int:
        """Rows per sequence that there is room for, scratch rows included."""
        return self._storage.capacity

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed rows of each sequence, length B."""
        return tuple(self._storage.lengths)

    def suit(self, model: object, *, layers: int) -> None:
        """Follow a model that was changed between two texts; memory is taken anew.

        Args:
            model: What it is now, the same object as long as it stays what it is.
            layers: L.
        """
        if model is not self._made_for and not any(self.lengths):
            self._storage.let_go(layers=layers)
            self.layers = [_Layer(self._storage, index) for index in range(layers)]
            self._made_for = model

    def begin(self, rows: Sequence[int]) -> None:
        """Make ready for a pass that writes so many rows behind each sequence.

        Raises:
            GenerationError: They do not fit, or there is no memory for them.
        """
        moves = self._storage.moves
        self._storage.begin(rows)
        if self._storage.moves != moves:
            for layer in self.layers:
                layer.follow()

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep, for each sequence, these rows of the last pass, in this order; drop the rest."""
        self._storage.commit(rows)
        for text, tokens, keep in zip(self.texts, self.running, rows, strict=False):
            text += [tokens[row] for row in keep]

    @torch.inference_mode()
    def take(self, index: int, other: HFCache) -> None:
        """Put the only sequence of another cache of this model in the place of one of ours."""
        length = other.lengths[0]
        for mine, theirs in zip(self._storage.slabs, other._storage.slabs, strict=True):
            mine[:, index, :, :length] = theirs[:, 0, :, :length]

    def keep(self, sequences: Sequence[int]) -> None:
        """Let go of all sequences but these, ascending; they are numbered anew from 0."""
        self._storage.keep(sequences)
        self.texts = [self.texts[old] for old in sequences]
        self.is_long = [self.is_long[old] for old in sequences]

    def repeat(self, sequences: Sequence[int]) -> None:
        """Go on with copies of these sequences, each ``sequences[i] <= i``; see ``HasRepeat``."""
        self._storage.repeat(sequences)
        self.texts = [list(self.texts[old]) for old in sequences]
        self.is_long = [self.is_long[old] for old in sequences]

    def reset(self) -> None:
        """Forget every row; all sequences are there again, and the memory stays."""
        self._storage.reset()
        self._forget()
