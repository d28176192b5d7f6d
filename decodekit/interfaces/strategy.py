"""The interfaces of decodekit: all that a plugin author has to read.

A decoding step is: a ``Proposer`` guesses a token tree, a ``ModelAdapter`` runs it in one forward
pass (with an ``AttentionBackend`` under it), a ``Verifier`` walks it, and the proposer observes
what came of it. Anything with the right methods fits; nothing has to be subclassed.

Shapes: B batch, H query heads, K kv heads, D head dim, R rows, P prefix, S = P + R, T nodes,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import EMPTY_TREE, TokenTree

__all__ = [
    "Accepted",
    "AttentionBackend",
    "Budget",
    "Compilation",
    "HasArgmax",
    "HasExecution",
    "HasHorizon",
    "HasPositionLimit",
    "HasRepeat",
    "KVCache",
    "MaskBuilder",
    "ModelAdapter",
    "NGramPool",
    "NeedsTarget",
    "Parts",
    "Proposal",
    "Proposer",
    "StepOutcome",
    "Strategy",
    "TargetTokens",
    "Verifier",
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


class Accepted(NamedTuple):
    """One token that the model agrees with.

    Attributes:
        token: Its id.
        node: The node that carries it, or any other one that stands for the same path; None for the
            bonus, the model's own token after the last accepted node.
    """

    token: int
    node: int | None


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


@runtime_checkable
class Verifier(Protocol):
    """Decides which part of a proposal the model would have said itself.

    Two attributes say what it does not promise; where one is missing it is True:

    * ``same_tokens = False``: under sampling it gives the model's distribution, but not the same
      tokens whatever the proposal.
    * ``in_order = False``: it may ask ``target`` about rows that are not the next of the text, in
      any order. Logits processors then need ``fork()``, and are copied for every path. In order,
      a processor is called once for each emitted token, and nobody copies it.
    """

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        """Yield the accepted tokens, from the anchor's child down, and then the bonus.

        It is asked for one after the other and left where the text ends, so that nothing is asked
        of ``target`` about what comes after the end.
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


@runtime_checkable
class MaskBuilder(Protocol):
    """Turns mask descriptions into what a kernel takes, once per step."""

    def lower(
        self,
        masks: Sequence[TreeMask],
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """Return the kernel's form of the masks of B sequences.

        Args:
            masks: One mask per sequence.
            window: The sliding window of the layers it is for; None for full attention.
            dtype: The dtype of queries and keys.
            device: Their device.
        """
        ...


@runtime_checkable
class AttentionBackend(MaskBuilder, Protocol):
    """One attention kernel: lowers the masks of a step once, attends once per layer.

    One that is compiled for each number of keys anew has a method ``key_rows(rows: int) -> int``
    that rounds S up to one of few, and does not fall with it. An adapter may then hand over keys
    and values of that length, of which the last rows mean nothing but are finite; one that does
    not costs the backend a copy.
    """

    @property
    def name(self) -> str:
        """The name that it is registered under."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lowered: Any,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [B, R, H, D].

        Args:
            query: [B, H, R, D].
            key: [B, K, S, D], the prefix's rows first; H is a multiple of K.
            value: [B, K, S, D].
            lowered: What ``lower`` returned for this step and this layer's window.
            scale: Factor on the scores.
            softcap: Scores become ``softcap * tanh(scores / softcap)`` before the mask.
            sinks: [H], one further score per head that takes part in the softmax and adds nothing.

        Raises:
            BackendError: The backend does not support ``softcap`` or ``sinks``.
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
