"""Timing steps of different numbers of rows, in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import product

from decodekit.cli.profile.limits import synchronize
from decodekit.engine.runner import LocalRunner
from decodekit.errors import ConfigError
from decodekit.interfaces.adapter import ModelAdapter
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree

__all__ = ["StepTimer", "tree_of"]

_LEVELS = 3  # of the window: n-grams of four tokens, as in the default settings of lookahead
_WARMUP = 3


def tree_of(rows: int, shape: str, tokens: Sequence[int]) -> TokenTree:
    """Return the tree of a step with so many rows, the anchor's included.

    Args:
        rows: 1 or more.
        shape: ``chain`` is one path. ``window`` is a lookahead window of three levels, its last one
            not full where ``rows`` is no multiple of three: cell (level r, column j) hangs below
            (r-1, j), and on level 0 below (0, j-1); cell (0, 0) is the anchor.
        tokens: Token ids to take from, ``rows - 1`` or more.
    """
    width = rows if shape == "chain" else -(-rows // _LEVELS)
    parents = tuple((cell - 1 if cell < width else cell - width) - 1 for cell in range(1, rows))
    return TokenTree(tuple(tokens[: rows - 1]), parents)


class StepTimer:
    """Steps on an adapter, behind contexts of random tokens.

    What is timed is a forward pass of the adapter, the lowering of its mask included, until its
    logits are there. Proposing, choosing tokens and committing are not in it.

    Args:
        adapter: The model.
        rows: Numbers of rows.
        contexts: Numbers of tokens in the cache.
        shape: See ``tree_of``.
        prefill_chunk: Most context tokens in one pass.

    Raises:
        ConfigError: A step needs more positions than the model has.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        rows: Sequence[int],
        contexts: Sequence[int],
        shape: str,
        prefill_chunk: int = 512,
    ) -> None:
        self._adapter = adapter
        self._shape = shape
        self._chunk = prefill_chunk
        self._generator = random.Random(0)
        self._runners: dict[int, LocalRunner] = {}
        self._most = max(rows)
        self.points = list(product(contexts, rows))
        """What is timed, each a context and a number of rows."""
        for context, count in self.points:
            self._check_positions(self.plan(context, count))

    def plan(self, context: int, rows: int) -> StepPlan:
        """Return a new step of so many rows behind a context."""
        anchor, *guesses = self._random_tokens(rows)
        return StepPlan(context, (anchor,), tree_of(rows, self._shape, guesses))

    def prepare(self) -> None:
        """Fill the caches, and run every step a few times.

        Raises:
            GenerationError: There is no memory for a cache.
        """
        for context in dict.fromkeys(context for context, _ in self.points):
            runner = LocalRunner(self._adapter, prefill_chunk=self._chunk)
            runner.start(capacity=context + self._most)
            runner.run([StepPlan(0, self._random_tokens(context))])
            runner.commit([()])
            self._runners[context] = runner
        for _ in range(_WARMUP):
            for context, rows in self.points:
                self.seconds(context, rows)

    def repeats(self, count: int) -> Iterator[tuple[int, int, float]]:
        """Yield context, rows and seconds of every step, ``count`` times.

        Each repeat times all of them, in an order of its own, so that what the machine does in the
        background hits all alike.
        """
        order = list(self.points)
        for _ in range(count):
            self._generator.shuffle(order)
            for context, rows in order:
                yield context, rows, self.seconds(context, rows)

    def seconds(self, context: int, rows: int) -> float:
        """Return the time of one step; nothing of it stays in the cache."""
        runner = self._runners[context]
        # A new plan each time, as in decoding: what it works out once is in the time.
        plan = self.plan(context, rows)
        synchronize()
        start = time.perf_counter()
        logits = self._adapter.forward([plan], runner.cache)
        synchronize()
        seconds = time.perf_counter() - start
        del logits
        return seconds

    def _random_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._generator.choices(range(self._adapter.vocab_size), k=count))

    def _check_positions(self, plan: StepPlan) -> None:
        limit = LocalRunner(self._adapter).horizon(plan.prefix + 1)
        needed = 1 + max(plan.positions)
        if limit is not None and needed > limit:
            raise ConfigError(
                f"a step of {plan.rows} rows behind {plan.prefix} tokens needs {needed} positions "
                f"and the model has {limit}; lower profile.contexts or profile.rows",
                key="profile.contexts",
                value=plan.prefix,
            )
