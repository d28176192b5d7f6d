"""A language model without weights, strict where a real one would compute nonsense.

Its logits are a hash of the path, so two different paths have unrelated logits and a step that
runs, keeps or emits a wrong row shows at once. It sees tokens only through the plan's mask and its
own cache, and fails if what a row sees is not one unbroken path from position 0, computed on that
path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from decodekit.interfaces.plan import StepPlan

__all__ = ["ToyAdapter", "ToyCache"]

Path: TypeAlias = "tuple[int, ...]"


class ToyCache:
    """The ``KVCache`` of ``ToyAdapter``: a row is the path it was computed on, itself included."""

    def __init__(self, *, batch: int, capacity: int) -> None:
        self.capacity = capacity
        self.batch = batch
        self.rows: list[list[Path]] = []
        self.scratch: list[list[Path]] = []
        self.reset()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed rows of each sequence."""
        return tuple(len(rows) for rows in self.rows)

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep these rows of the last pass."""
        assert len(rows) == len(self.rows), "commit names every sequence"
        for committed, scratch, keep in zip(self.rows, self.scratch, rows, strict=True):
            committed.extend(scratch[row] for row in keep)
            scratch.clear()

    def keep(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences only."""
        assert list(sequences) == sorted(set(sequences)), "sequences are named in order, once"
        self.rows = [self.rows[sequence] for sequence in sequences]
        self.scratch = [[] for _ in sequences]

    def repeat(self, sequences: Sequence[int]) -> None:
        """Go on with copies of these sequences."""
        assert all(old <= new for new, old in enumerate(sequences)), "no one comes from behind"
        assert len(sequences) <= self.batch, "more sequences than there is room for"
        self.rows = [list(self.rows[old]) for old in sequences]
        self.scratch = [[] for _ in sequences]

    def reset(self) -> None:
        """Forget every row."""
        self.rows = [[] for _ in range(self.batch)]
        self.scratch = [[] for _ in range(self.batch)]


class ToyAdapter:
    """A deterministic ``ModelAdapter`` over a small vocabulary.

    Args:
        vocab_size: V.
        seed: Another seed is another model.
        eos: The tokens that end a text.
        max_positions: Positions that the model has; None for no limit.
        context: Last tokens that the logits depend on; None for the whole path. With a small one
            a text soon repeats itself, so that lookups and pools find something.
        dtype: Of the logits.

    Attributes:
        forwards: The plans of every forward pass so far.
        caches: Every cache made so far.
    """

    def __init__(
        self,
        vocab_size: int = 11,
        seed: int = 0,
        *,
        eos: Iterable[int] = (),
        max_positions: int | None = None,
        context: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.eos_token_ids = frozenset(eos)
        self.max_positions = max_positions
        self.context = context
        self.dtype = dtype
        self.forwards: list[list[StepPlan]] = []
        self.caches: list[ToyCache] = []

    def logits_after(self, path: Sequence[int]) -> Tensor:
        """Return the logits [V] after the tokens ``path``: the whole model, in one line or two."""
        seen = path if self.context is None else path[max(len(path) - self.context, 0) :]
        name = f"{self.seed}:{','.join(map(str, seen))}".encode()
        noise = np.frombuffer(hashlib.shake_128(name).digest(4 * self.vocab_size), dtype="<u4")
        return torch.from_numpy(noise / 2.0**32 * 6 - 3).to(self.dtype)

    def new_cache(self, *, batch: int, capacity: int) -> ToyCache:
        """Return an empty cache."""
        cache = ToyCache(batch=batch, capacity=capacity)
        self.caches.append(cache)
        return cache

    def forward(self, plans: Sequence[StepPlan], cache: Any) -> list[Tensor]:
        """Run one step; see ``ModelAdapter.forward``."""
        assert tuple(plan.prefix for plan in plans) == cache.lengths, "a plan for another prefix"
        ends = [plan.prefix + plan.rows for plan in plans]
        assert max(ends) <= cache.capacity, "more rows than the cache has"
        self.forwards.append(list(plans))
        return [self._run(plan, cache, index) for index, plan in enumerate(plans)]

    def _run(self, plan: StepPlan, cache: ToyCache, index: int) -> Tensor:
        mask = plan.mask()
        committed, scratch = cache.rows[index], cache.scratch[index]
        scratch.clear()
        for row, (token, position) in enumerate(zip(plan.tokens, plan.positions, strict=True)):
            keys = [*committed, *scratch]  # a row sees none that comes after it
            seen = [key for place, key in enumerate(keys) if mask.sees(row, place)]
            later = range(plan.prefix + row + 1, plan.prefix + plan.rows)
            assert not any(mask.sees(row, place) for place in later), "a later row is seen"
            seen.sort(key=len)
            assert [len(key) for key in seen] == list(range(1, position + 1)), "a gap in the path"
            path = (*seen[-1], token) if seen else (token,)
            assert all(key == path[: len(key)] for key in seen), "a row of another path is seen"
            assert self.max_positions is None or position < self.max_positions, "no such position"
            assert 0 <= token < self.vocab_size, "no such token"
            scratch.append(path)
        return torch.stack([self.logits_after(path) for path in scratch[plan.anchor_row :]])
