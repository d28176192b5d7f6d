"""An adapter under test, and the plainest way to ask it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decodekit.interfaces.adapter import HasHorizon, KVCache, ModelAdapter
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree
from decodekit.testing.laws import generators, law, random_tokens, random_tree

__all__ = ["Subject"]


class Subject:
    """An adapter, and what the suite knows of it.

    Args:
        adapter: What is checked.
        reference: The logits [V] after some tokens without the adapter, or None.
        atol: Largest difference of two logits that should be equal.
        seed: Of the random choices.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        reference: Callable[[Sequence[int]], Tensor] | None,
        atol: float,
        seed: int,
    ) -> None:
        self.adapter = adapter
        self.reference = reference
        self.atol = atol
        self.choose = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Return random tokens."""
        return [*random_tokens(self.choose, count, self.adapter.vocab_size)]

    def horizon(self, length: int) -> int | None:
        """Return the positions that a pass over so many committed tokens may use; None for any."""
        limits = [self.adapter.max_positions]
        if isinstance(self.adapter, HasHorizon):
            limits.append(self.adapter.horizon(length))
        return min((limit for limit in limits if limit is not None), default=None)

    def tree(self, nodes: int, *, after: int, depth: int = 64) -> TokenTree:
        """Return a random tree for a text of ``after`` tokens, within its horizon."""
        limit = self.horizon(after)
        deepest = depth if limit is None else min(depth, limit - after)
        return random_tree(self.choose, nodes, self.adapter.vocab_size, depth=deepest)

    def new_cache(self, *, capacity: int, batch: int = 1) -> KVCache:
        """Return an empty cache."""
        cache = self.adapter.new_cache(batch=batch, capacity=capacity)
        law(
            cache.lengths == (0,) * batch,
            "a new cache is empty, with one length for each sequence",
            f"batch {batch}, lengths {cache.lengths!r}",
        )
        return cache

    def prefilled(self, text: Sequence[int], *, capacity: int) -> KVCache:
        """Return a cache that holds ``text``."""
        cache = self.new_cache(capacity=max(capacity, 1))
        if text:
            self.run(cache, [StepPlan(0, tuple(text))])
            cache.commit([range(len(text))])
        return cache

    def alone(self, text: Sequence[int]) -> Tensor:
        """Return the logits [V] after ``text``: one chain, one sequence, a cache of its own."""
        cache = self.new_cache(capacity=len(text))
        return self.run(cache, [StepPlan(0, tuple(text))])[0][0]

    def check_reference(self, text: Sequence[int], actual: Tensor) -> None:
        """Raise unless logits [V] after ``text`` are those of the reference, if there is one."""
        if self.reference is not None:
            where = f"{list(text)}, {len(text)} tokens"
            self.close(actual, self.reference(text), "a chain has the model's logits", where)

    def run(
        self, cache: KVCache, plans: list[StepPlan], *, name: str = "logits are finite"
    ) -> list[Tensor]:
        """Run a step; return the logits in float64 on the host.

        Args:
            cache: The cache.
            plans: One per sequence.
            name: The law that is broken by logits that are not finite.
        """
        before = cache.lengths
        state = generators()
        try:
            logits = self.adapter.forward(plans, cache)
        except Exception as error:
            raise AssertionError(
                "broken law: a pass for which there is room runs; it raised "
                f"{type(error).__name__}: {error}; {plans}, capacity {cache.capacity}"
            ) from error
        law(
            generators() == state,
            "the global random generators are left alone",
            f"{plans}",
        )
        law(len(logits) == len(plans), "one result per sequence", f"{len(logits)} for {plans}")
        law(
            cache.lengths == before,
            "a pass commits nothing",
            f"lengths {before} became {cache.lengths} with {plans}",
        )
        for rows, plan in zip(logits, plans, strict=True):
            shape = (1 + len(plan.tree), self.adapter.vocab_size)
            law(
                tuple(rows.shape) == shape,
                "the logits are [1 + T, V]",
                f"they are {list(rows.shape)}, not {list(shape)}, for {plan}",
            )
            law(not rows.requires_grad, "the logits need no gradient", f"they do, for {plan}")
            law(bool(torch.isfinite(rows).all()), name, f"some are not finite, for {plan}")
        return [rows.detach().cpu().double() for rows in logits]

    def close(self, actual: Tensor, expected: Tensor, name: str, where: object) -> None:
        """Raise unless two rows of logits are equal, up to ``atol``."""
        gap = float((actual - expected.detach().cpu().double()).abs().max())
        law(gap <= self.atol, name, f"off by {gap:.3g}, with {where}")
