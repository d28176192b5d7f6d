"""How a model runs a step: the protocols of an adapter and of its cache.

Shapes: B batch, K kv heads, D head dim, R rows, P prefix, T nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from decodekit.interfaces.plan import StepPlan

__all__ = [
    "Compilation",
    "HasArgmax",
    "HasExecution",
    "HasHorizon",
    "HasPositionLimit",
    "HasRepeat",
    "KVCache",
    "ModelAdapter",
]


@runtime_checkable
class HasHorizon(Protocol):
    """A model adapter for which guesses must not reach beyond some positions for a while."""

    def horizon(self, length: int) -> int | None:
        """Return the number of positions that a pass over ``length`` committed tokens may use.

        None if it is ``max_positions``.
        """
        ...


@runtime_checkable
class HasPositionLimit(Protocol):
    """A model adapter that can be told how long a text may be."""

    def limit_positions(self, count: int) -> None:
        """Let ``max_positions`` be ``count`` from now on, whatever the configuration says.

        Raises:
            ConfigError: The model cannot run so many.
        """
        ...


@dataclass(frozen=True, slots=True)
class Compilation:
    """What compiling has cost.

    Attributes:
        count: How often something was compiled.
        seconds: How long the passes took that waited for it.
    """

    count: int
    seconds: float


@runtime_checkable
class HasExecution(Protocol):
    """A model adapter that can launch its passes in several ways."""

    @property
    def compilation(self) -> Compilation | None:
        """What compiling has cost so far; None where nothing is compiled."""
        ...

    def native_obstacle(self) -> str | None:
        """Return why ``native`` cannot work here, in one clause; None if it can."""
        ...

    def use_execution(self, mode: str) -> None:
        """Launch passes in another way from now on; caches made before must not be used again.

        Args:
            mode: ``eager``, ``native``, ``compiled`` or ``graphs``.

        Raises:
            ConfigError: That way cannot work here.
        """
        ...


class KVCache(Protocol):
    """The keys and values of the committed tokens of B sequences.

    A forward pass writes its rows behind the committed ones; ``commit`` keeps some of them.
    """

    @property
    def capacity(self) -> int:
        """Rows per sequence that there is room for, scratch rows included."""
        ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed rows of each sequence, length B."""
        ...

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep, for each sequence, these rows of the last forward pass, in this order.

        Row 0 is the first row of the step's plan. Rows that are not named are lost.
        """
        ...

    def keep(self, sequences: Sequence[int]) -> None:
        """Let go of all sequences but these, ascending; they are numbered anew from 0."""
        ...

    def reset(self) -> None:
        """Forget every row; all sequences are there again, and the memory stays."""
        ...


@runtime_checkable
class HasArgmax(Protocol):
    """An adapter that finds the largest logits faster than torch does."""

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the largest number of each row [R, V] and its place, both [R].

        The place is the first of equals; a row with NaN has NaN as its largest. None leaves these
        rows to torch.
        """
        ...


@runtime_checkable
class HasRepeat(Protocol):
    """A cache that can copy sequences, so that what several begin with is run once."""

    def repeat(self, sequences: Sequence[int]) -> None:
        """Go on with copies: sequence ``i`` has the committed rows of ``sequences[i]`` of today.

        Args:
            sequences: At most as many as the cache was made for; ``sequences[i]`` is ``i`` or less.
        """
        ...


@runtime_checkable
class ModelAdapter(Protocol):
    """A causal language model, seen as: token trees in, logits out.

    If it has an attribute ``name``, reports call it so, else by its class; if it has one ``model``,
    they read its ``dtype`` and ``device``.
    """

    @property
    def vocab_size(self) -> int:
        """V, the number of logits of a row."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has, or None if there is no limit."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text, from the model's own configuration."""
        ...

    def new_cache(self, *, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for ``batch`` sequences of at most ``capacity`` rows each."""
        ...

    def forward(self, plans: Sequence[StepPlan], cache: KVCache) -> list[Tensor]:
        """Run one step of B sequences in one forward pass.

        Args:
            plans: One plan per sequence; ``plans[b].prefix`` is ``cache.lengths[b]``.
            cache: A cache that this adapter made. The pass writes its rows behind the committed
                ones and commits none.

        Returns:
            Per sequence the logits [1 + T, V] in the model's dtype: entry 0 after the anchor,
            entry ``node + 1`` after a node.
        """
        ...
