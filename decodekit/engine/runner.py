"""Running plans: the cache of one request, and prompts too long for one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from decodekit.errors import require_at_least
from decodekit.interfaces.adapter import HasHorizon, HasRepeat, KVCache, ModelAdapter
from decodekit.interfaces.plan import StepPlan

__all__ = ["Cancelled", "LocalRunner"]


class Cancelled(Exception):  # noqa: N818  # no mistake of anybody
    """The request was cancelled between two passes."""


class LocalRunner:
    """Runs steps on one adapter in this process and owns the cache.

    Args:
        adapter: The model.
        prefill_chunk: Most pending tokens in one pass; a longer prompt is run in several, so that
            the memory of a pass is bounded.

    Raises:
        ConfigError: ``prefill_chunk`` is below 1.
    """

    def __init__(self, adapter: ModelAdapter, *, prefill_chunk: int = 512) -> None:
        require_at_least(prefill_chunk, 1, key="prefill_chunk")
        self.adapter = adapter
        self.prefill_chunk = prefill_chunk
        self._cache: KVCache | None = None
        # Asked once: it is a question of a tenth of a millisecond, and every step needs an answer.
        self._moving = adapter if isinstance(adapter, HasHorizon) else None
        self._max_positions = adapter.max_positions  # and once a request: a model may be changed
        self._cancelled: Callable[[], bool] = lambda: False
        self._leads: list[int] = []  # pending rows of the last pass, per sequence
        self.forward_seconds = 0.0
        """Wall time spent in the adapter since ``start``; on a GPU, until its calls returned."""

    @property
    def cache(self) -> KVCache:
        """The cache of the request under way; ``start`` makes it."""
        assert self._cache is not None, "start() comes first"
        return self._cache

    def horizon(self, length: int) -> int | None:
        """Return how many positions a pass may use with ``length`` tokens committed; None for any.

        Usually they are the model's ``max_positions``.
        """
        limits = [self._max_positions]
        if self._moving is not None:
            limits.append(self._moving.horizon(length))
        return min((limit for limit in limits if limit is not None), default=None)

    def start(
        self,
        *,
        batch: int = 1,
        capacity: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin a request with an empty cache that has at least ``capacity`` rows per sequence.

        The memory of an earlier request is taken again if it is large enough.

        Args:
            batch: Sequences.
            capacity: Rows per sequence.
            cancelled: Asked between the passes of a long prompt whether to give up.
        """
        self.forward_seconds = 0.0
        self._cancelled = cancelled
        self._max_positions = self.adapter.max_positions
        cache = self._cache
        if cache is not None:
            cache.reset()
            if len(cache.lengths) == batch and cache.capacity >= capacity:
                return
        self._cache = cache = None  # let the old memory go before the new is taken
        self._cache = self.adapter.new_cache(batch=batch, capacity=capacity)

    def share(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run prompts that are equal once, all but their last tokens, and copy the rows.

        Does nothing where all differ, or the cache cannot copy. Comes between ``start`` and the
        first ``run``.

        Args:
            prompts: The prompt of each sequence.

        Raises:
            Cancelled: The request was cancelled meanwhile.
        """
        leaders: dict[tuple[int, ...], int] = {}
        sources = [leaders.setdefault(tuple(prompt), len(leaders)) for prompt in prompts]
        if len(leaders) == len(prompts) or not isinstance(self.cache, HasRepeat):
            return
        self.cache.keep(range(len(leaders)))  # there is nothing in it yet
        # A prompt of one token has nothing before its last; its row is run and not kept.
        self.run([StepPlan(0, prompt[:-1] or prompt) for prompt in leaders])
        self.cache.commit(
            [
                range(min(lead, len(prompt) - 1))
                for lead, prompt in zip(self._leads, leaders, strict=True)
            ]
        )
        self.cache.repeat(sources)

    def run(self, plans: Sequence[StepPlan]) -> list[Tensor]:
        """Run one step; return per sequence the logits [1 + T, V] of its anchor and nodes.

        Pending tokens beyond ``prefill_chunk`` are run and committed in passes of their own first.

        Raises:
            Cancelled: The request was cancelled meanwhile.
        """
        return self._forward(self._prefill(plans))

    def commit(self, keep: Sequence[Sequence[int]]) -> None:
        """Keep, per sequence, the pending rows of the last step and these nodes of its tree."""
        self.cache.commit(
            [
                [*range(lead), *(lead + node for node in nodes)]
                for lead, nodes in zip(self._leads, keep, strict=True)
            ]
        )

    def keep(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences only, ascending; they are numbered anew from 0."""
        self.cache.keep(sequences)

    def _prefill(self, plans: Sequence[StepPlan]) -> list[StepPlan]:
        """Run and commit pending tokens until every plan has at most a chunk of them left."""
        chunk = self.prefill_chunk
        plans = list(plans)
        while any(len(plan.pending) > chunk for plan in plans):
            # A sequence that is done already takes part with one row that is not kept.
            takes = [chunk if len(plan.pending) > chunk else 0 for plan in plans]
            self._forward(
                [
                    StepPlan(plan.prefix, plan.pending[: take or 1])
                    for plan, take in zip(plans, takes, strict=True)
                ]
            )
            self.cache.commit([range(take) for take in takes])
            plans = [
                StepPlan(plan.prefix + take, plan.pending[take:], plan.tree)
                for plan, take in zip(plans, takes, strict=True)
            ]
            if self._cancelled():
                raise Cancelled
        self._leads = [len(plan.pending) for plan in plans]
        return plans

    def _forward(self, plans: Sequence[StepPlan]) -> list[Tensor]:
        start = time.perf_counter()
        logits = self.adapter.forward(plans, self.cache)
        self.forward_seconds += time.perf_counter() - start
        return logits
