"""Token trees on ``ByteModel``, and the cache for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decodekit.errors import GenerationError
from decodekit.interfaces import AttentionBackend, KVCache
from decodekit.interfaces.plan import StepPlan
from decodekit_example.model import END, POSITIONS, VOCABULARY, ByteModel

__all__ = ["ByteAdapter", "ByteCache"]


class ByteCache:
    """The keys and values of all layers, two tensors [L, B, K, C, D].

    Args:
        model: Gives the shapes.
        batch: B, sequences.
        capacity: C, rows per sequence.
    """

    def __init__(self, model: ByteModel, *, batch: int, capacity: int) -> None:
        shape = (len(model.blocks), batch, model.kv_heads, capacity, model.dim)
        # Zeros, not empty: rows that only pad a batch are masked, but 0 * NaN would be NaN.
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self.capacity = capacity
        self._lengths = [0] * batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed rows of each sequence."""
        return tuple(self._lengths)

    def write(
        self, layer: int, key: Tensor, value: Tensor, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Write new rows [B, K, R, D] behind the committed ones; return all rows so far."""
        for index, (start, end) in enumerate(zip(self._lengths, ends, strict=True)):
            self.keys[layer, index, :, start:end] = key[index, :, : end - start]
            self.values[layer, index, :, start:end] = value[index, :, : end - start]
        batch, end = len(ends), max(ends)
        return self.keys[layer, :batch, :, :end], self.values[layer, :batch, :, :end]

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep these rows of the last pass, in this order."""
        for index, keep in enumerate(rows):
            start = self._lengths[index]
            end = start + len(keep)
            source = torch.tensor([start + row for row in keep], device=self.keys.device).long()
            for states in (self.keys, self.values):
                states[:, index, :, start:end] = states[:, index].index_select(2, source)
            self._lengths[index] = end

    def keep(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences only."""
        for states in (self.keys, self.values):
            states[:, : len(sequences)] = states[:, list(sequences)]
        self._lengths = [self._lengths[old] for old in sequences]

    def reset(self) -> None:
        """Forget every row."""
        self._lengths = [0] * self.keys.shape[1]


class ByteAdapter:
    """Runs steps on a ``ByteModel``.

    Args:
        model: In evaluation mode.
        backend: The attention kernel.
    """

    vocab_size = VOCABULARY
    max_positions = POSITIONS
    eos_token_ids = frozenset({END})

    def __init__(self, model: ByteModel, backend: AttentionBackend) -> None:
        self.model = model
        self.backend = backend

    def new_cache(self, *, batch: int, capacity: int) -> ByteCache:
        """Return an empty cache."""
        return ByteCache(self.model, batch=batch, capacity=capacity)

    @torch.inference_mode()
    def forward(self, plans: Sequence[StepPlan], cache: KVCache) -> list[Tensor]:
        """Run one step of B sequences in one pass."""
        assert isinstance(cache, ByteCache)
        model, rows = self.model, max(plan.rows for plan in plans)
        ends = [plan.prefix + plan.rows for plan in plans]
        if max(ends) > cache.capacity:
            raise GenerationError(f"{max(ends)} rows do not fit a cache of {cache.capacity}")
        lowered = self.backend.lower(
            [plan.mask() for plan in plans], window=None, dtype=model.dtype, device=model.device
        )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.write(layer, key, value, ends)
            return self.backend.attend(query, keys, values, lowered, scale=model.dim**-0.5)

        def padded(values: tuple[int, ...]) -> tuple[int, ...]:
            return values + values[-1:] * (rows - len(values))

        tokens = torch.tensor([padded(plan.tokens) for plan in plans], device=model.device)
        positions = torch.tensor([padded(plan.positions) for plan in plans], device=model.device)
        states = model(tokens, positions, attend)
        return [
            model.logits(states[index, plan.anchor_row : plan.rows])
            for index, plan in enumerate(plans)
        ]
