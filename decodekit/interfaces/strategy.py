"""What is guessed: the protocols of a strategy and its proposers, and what they are told.

Shapes: T nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from decodekit.interfaces.adapter import ModelAdapter
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import EMPTY_TREE, TokenTree

__all__ = [
    "Budget",
    "NGramPool",
    "NeedsTarget",
    "Parts",
    "Proposal",
    "Proposer",
    "StepOutcome",
    "Strategy",
    "TargetTokens",
]


@dataclass(frozen=True, slots=True)
class Budget:
    """How large a proposal may be in this step.

    Attributes:
        nodes: Most nodes that the cache has room for.
        depth: Deepest node whose position the model has; a deeper one is an error.
        tokens: New tokens that may still be emitted, 1 or more, the bonus included. Nodes deeper
            than ``tokens - 1`` cannot be accepted; they are allowed but only cost time.
    """

    nodes: int
    depth: int
    tokens: int

    @property
    def useful_depth(self) -> int:
        """Deepest node that can still be accepted."""
        return min(self.depth, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a proposer guesses for one step.

    Attributes:
        tree: The guessed tokens below the anchor.
        draft_probs: For drafts that were drawn at random, entry ``node`` holds the probabilities
            that the node's token was drawn with, given its earlier siblings, [T, V]. None for
            guesses that are certain of themselves (point masses).
    """

    tree: TokenTree = EMPTY_TREE
    draft_probs: Tensor | None = None


class TargetTokens(Protocol):
    """What the target model says after each row of a step, computed when asked for.

    Its token is the argmax under greedy decoding and the draw for that row's position under
    sampling; either way it depends on the row's path alone, never on the strategy.
    """

    def after(self, node: int) -> int:
        """Return the model's token after ``node``, or after the anchor for ``ROOT``.

        When the step has been judged, this is ``guess_many``: a logits processor is called for the
        tokens of the text and for no others.
        """
        ...

    def after_many(self, nodes: Sequence[int]) -> list[int]:
        """Return the model's token after each of ``nodes``, in one go."""
        ...

    def guess_many(self, nodes: Sequence[int]) -> list[int]:
        """Return likely tokens after each of ``nodes``, for guesses: exact or cheap.

        They are the model's tokens, but for nodes that nobody has asked ``after`` about they are
        chosen without the request's logits processors and constraint.
        """
        ...

    def probabilities(self, node: int) -> Tensor:
        """Return the distribution [V] that the token after ``node`` is drawn from.

        It sums to about 1; under greedy decoding all of it is on one token.
        """
        ...

    def uniform(self, node: int, draw: int) -> float:
        """Return a number in [0, 1) for testing drafts of the token after ``node``.

        It is the same for every call with the same node's position and ``draw``, and independent of
        the model's own draws.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a proposer learns from a step that has been run and committed.

    Attributes:
        plan: The step as it was run.
        proposal: The proposal that this proposer made.
        target: The model's token after any node of the proposal; where the walk did not come to a
            node, without the request's logits processors and constraint.
        accepted: The nodes that were committed, after all stop rules.
        tokens: The tokens that were emitted, after all stop rules: those of ``accepted`` and, if
            nothing cut the run, the bonus.
        committed: Every committed token so far, the prompt's first; shared, not to be changed.
    """

    plan: StepPlan
    proposal: Proposal
    target: TargetTokens
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    committed: Sequence[int]


@runtime_checkable
class Proposer(Protocol):
    """Guesses what comes next. One proposer serves one sequence and is then thrown away."""

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return a proposal within ``budget``.

        Args:
            committed: Every committed token, the prompt's first; the last is the anchor. Shared,
                not to be changed.
            budget: The largest tree that may be returned.
        """
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from the step that the last proposal led to."""
        ...


@runtime_checkable
class Strategy(Protocol):
    """A configured way to guess: makes a fresh proposer for every sequence."""

    @property
    def max_nodes(self) -> int:
        """Nodes of its largest proposal; the cache keeps as many scratch rows."""
        ...

    def new_proposer(self, params: SamplingParams) -> Proposer:
        """Return a proposer for one sequence.

        Args:
            params: How the target's tokens are chosen, for a strategy that draws its guesses alike.
        """
        ...


@runtime_checkable
class NeedsTarget(Protocol):
    """A strategy that has to know which model it guesses for."""

    def attached(self, target: ModelAdapter, tokenizer: Any) -> Strategy:
        """Return the strategy for this model; called by each decoder.

        Args:
            target: The decoder's model.
            tokenizer: Its tokenizer, or None.

        Raises:
            ModelSupportError: The strategy cannot guess for this model.
        """
        ...


@runtime_checkable
class NGramPool(Protocol):
    """A bounded memory of which runs of tokens followed which token."""

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        """Remember that ``continuation`` followed ``key``."""
        ...

    def lookup(self, key: int) -> list[tuple[int, ...]]:
        """Return the continuations of ``key``, best first."""
        ...


class Parts(Protocol):
    """What the builder of a strategy may ask for."""

    def new_pool(self, name: str, *, per_key: int, max_keys: int) -> NGramPool:
        """Return an empty pool ``name`` for ``per_key`` continuations of ``max_keys`` keys."""
        ...

    def load_model(
        self, model: Any, *, backend: str, like: ModelAdapter
    ) -> tuple[ModelAdapter, Any]:
        """Return a further model and its tokenizer, or None for one that has none.

        Args:
            model: What ``model=...`` takes, or a loaded model.
            backend: The name of an attention backend.
            like: A model whose dtype and device it gets, as far as they are known.
        """
        ...
