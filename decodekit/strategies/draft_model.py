"""Speculative decoding with a draft model (Leviathan et al., 2023, arXiv 2211.17192), as trees.

A smaller causal language model with the same tokens guesses the next ones, level by level:
one pass of the draft for each level of the tree (SpecInfer, Miao et al., 2023, arXiv 2305.09781).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decodekit.engine.noise import DRAFT, PositionNoise
from decodekit.engine.runner import LocalRunner
from decodekit.engine.sampling import largest_of, make_sampler
from decodekit.errors import (
    ConfigError,
    GenerationError,
    ModelSupportError,
    require_at_least,
    require_nodes,
    shortened,
)
from decodekit.interfaces.adapter import ModelAdapter
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import Budget, Parts, Proposal, StepOutcome
from decodekit.interfaces.tree import ROOT, TokenTree

__all__ = ["DraftModel", "DraftModelConfig", "DraftProposer"]

_DRAFTS = ("greedy", "coupled", "sampled")


@dataclass(kw_only=True)
class DraftModelConfig:
    """Settings of ``strategy=draft_model``.

    Attributes:
        model: The draft: a name of ``conf/model``, a directory, ``owner/name`` on the hub, or, from
            Python, a loaded ``transformers`` model.
        num_tokens: Depth of the tree; the draft runs as many passes a step.
        branches: Children of a node on the first levels; later levels have one. Empty for a chain.
        drafts: ``coupled``: what the draft would choose with the very random numbers that decide
            the position, best first; the most probable tokens under greedy decoding. ``greedy``:
            the most probable tokens. ``sampled``: drawn from the draft's distribution, without
            replacement, and handed on with their probabilities; for ``verifier=rejection``.
        backend: The draft's attention backend.

    Raises:
        ConfigError: A value is out of its range.
    """

    name: str = "draft_model"
    model: Any = None
    num_tokens: int = 5
    branches: list[int] = field(default_factory=list)
    drafts: str = "coupled"
    backend: str = "auto"

    def __post_init__(self) -> None:
        require_at_least(self.num_tokens, 1, key="strategy.num_tokens")
        require_nodes(self.num_tokens, "num_tokens")
        if not isinstance(self.branches, list):
            raise ConfigError(
                f"branches must be a list of whole numbers, not {shortened(self.branches)}",
                key="strategy.branches",
            )
        for width in self.branches:
            require_at_least(width, 1, key="strategy.branches")
        if len(self.branches) > self.num_tokens:
            raise ConfigError(
                f"branches names {len(self.branches)} levels; num_tokens has {self.num_tokens}",
                key="strategy.branches",
            )
        if self.drafts not in _DRAFTS:
            raise ConfigError(
                f"drafts must be one of {', '.join(_DRAFTS)}, not {self.drafts!r}",
                key="strategy.drafts",
            )


class DraftModel:
    """Makes proposers that share one draft model, each with a cache of its own.

    Args:
        config: The settings.
        parts: Loads the draft, when a decoder attaches the strategy to its model.
    """

    def __init__(self, config: DraftModelConfig, parts: Parts) -> None:
        if config.model is None:
            raise ConfigError(
                "name the draft model: strategy.model=NAME, a directory or owner/name",
                key="strategy.model",
            )
        self.config = config
        self.widths = config.branches + [1] * (config.num_tokens - len(config.branches))
        self.max_nodes, level = 0, 1
        for width in self.widths:
            level *= width
            self.max_nodes += level
        require_nodes(self.max_nodes, "branches and num_tokens")
        self._parts = parts
        self._draft: ModelAdapter | None = None
        self._tokenizer: Any = None
        self._vocab_size = 0
        self._known = 0

    def attached(self, target: ModelAdapter, tokenizer: Any) -> DraftModel:
        """Return the strategy for ``target``; the draft is loaded once.

        The tokens that both have are drafted. Models of one family often have more logits than
        tokens, each another number of them; those that pad are never guessed.

        Raises:
            ModelSupportError: The draft has other tokens.
        """
        if self._draft is None:
            self._draft, self._tokenizer = self._parts.load_model(
                self.config.model, backend=self.config.backend, like=target
            )
        known, reason = _shared(self._draft, self._tokenizer, target, tokenizer)
        if reason is not None:
            raise ModelSupportError(
                f"the draft model {_name(self.config.model)} cannot draft for this model: {reason}",
                reason=reason,
            )
        bound = copy.copy(self)  # another decoder may have another number of logits
        bound._vocab_size = target.vocab_size
        bound._known = known
        return bound

    def new_proposer(self, params: SamplingParams) -> DraftProposer:
        """Return a proposer for one sequence; ``attached`` comes first."""
        if self._draft is None or not self._vocab_size:
            raise GenerationError("a draft model has to be attached to a decoder's model first")
        return DraftProposer(
            self._draft,
            self.widths,
            self.config.drafts,
            params,
            vocab_size=self._vocab_size,
            known=self._known,
        )


class DraftProposer:
    """Drafts for one sequence.

    Args:
        draft: The draft model.
        widths: Children of a node on each level.
        drafts: How they are chosen; see ``DraftModelConfig``.
        params: How the target's tokens are chosen.
        vocab_size: V of the target.
        known: How many of its first tokens the draft has too, and may guess.
    """

    def __init__(
        self,
        draft: ModelAdapter,
        widths: Sequence[int],
        drafts: str,
        params: SamplingParams,
        *,
        vocab_size: int,
        known: int,
    ) -> None:
        self._runner = LocalRunner(draft)
        self._widths = widths
        self._drafts = drafts
        self._sampler = make_sampler(params, largest_of(draft))
        self._noise = PositionNoise(params.seed, purpose=DRAFT)
        self._vocab_size = vocab_size
        self._known = known
        self._started = False

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return the draft's tree; nothing where the draft has no positions left."""
        limit = self._runner.horizon(len(committed))
        # The deepest nodes are never run by the draft, so they need no position in it.
        room = budget.useful_depth if limit is None else limit - len(committed) + 1
        widths = self._widths[: max(min(budget.useful_depth, room), 0)]
        if not widths or budget.nodes < 1:
            return Proposal()
        if not self._started:
            self._runner.start(capacity=len(committed) + budget.tokens + budget.nodes)
            self._started = True
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[Tensor] = []
        level = [ROOT]
        for depth, width in enumerate(widths):
            logits = self._run(committed, TokenTree(tuple(tokens), tuple(parents)))
            above, level = level, []
            for node in above:
                for token, q in self._children(logits[node + 1], len(committed) + depth, width):
                    if len(tokens) == budget.nodes:
                        break
                    level.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    if q is not None:
                        probs.append(q)
        tree = TokenTree(tuple(tokens), tuple(parents))
        return Proposal(tree, torch.stack(probs) if probs else None)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn nothing: the draft reads the committed tokens before its next guess."""

    def _run(self, committed: Sequence[int], tree: TokenTree) -> Tensor:
        """Return the draft's logits [1 + T, V] after the anchor and the nodes so far."""
        cache = self._runner.cache
        prefix = cache.lengths[0]
        # A token that the draft lacks stands for nothing; any other will do.
        last = self._runner.adapter.vocab_size - 1
        pending = tuple(min(token, last) for token in committed[prefix:])
        (logits,) = self._runner.run([StepPlan(prefix, pending, tree)])
        # All but the anchor is kept: the next level's pass starts from it again.
        cache.commit([range(len(committed) - 1 - cache.lengths[0])])
        if self._known == self._vocab_size == logits.shape[-1]:
            return logits
        others = self._vocab_size - self._known
        return torch.nn.functional.pad(logits[:, : self._known], (0, others), value=float("-inf"))

    def _children(
        self, logits: Tensor, position: int, width: int
    ) -> list[tuple[int, Tensor | None]]:
        """Return the guesses after one row and, if they were drawn, with which probabilities.

        Args:
            logits: [V].
            position: The absolute position of the guesses.
            width: How many.
        """
        if self._drafts == "sampled":
            return list(self._drawn(logits, position, width))
        if self._drafts == "coupled":
            logits = self._sampler.scores(logits[None], [position])[0]
        best: list[int] = logits.topk(min(width, self._known)).indices.tolist()
        return [(token, None) for token in best]

    def _drawn(self, logits: Tensor, position: int, width: int) -> Iterator[tuple[int, Tensor]]:
        q = self._sampler.probabilities(logits[None], [position])[0].double()
        # The race of the target's own draws; its runners-up are draws without replacement.
        scores = q / self._noise.rows([position], like=q[None])[0]
        possible = int((q > 0).sum())
        for token in scores.topk(min(width, possible)).indices.tolist():
            yield token, q / q.sum()
            q = q.clone()
            q[token] = 0


def _shared(
    draft: ModelAdapter, draft_tokenizer: Any, target: ModelAdapter, tokenizer: Any
) -> tuple[int, str | None]:
    """Return how many tokens, from the first, the two models share; and why they do not fit.

    A draft that was handed over as a loaded model comes without a tokenizer: it fits if it has
    logits for all tokens of the target's.
    """
    both = min(draft.vocab_size, target.vocab_size)
    ours, theirs = _tokens(tokenizer), _tokens(draft_tokenizer)
    if ours is not None and theirs is not None:
        common = ours.keys() & theirs.keys()
        if not common or any(ours[token] != theirs[token] for token in common):
            return 0, "its tokenizer has another vocabulary"
        return min(both, 1 + max(common)), None
    if draft_tokenizer is not None and tokenizer is not None:
        if type(draft_tokenizer) is not type(tokenizer):
            return 0, "its tokenizer is of another kind"
    elif ours:
        known = 1 + max(ours)
        if known <= both:
            return known, None
        if draft.vocab_size != target.vocab_size:
            return 0, f"it has {draft.vocab_size} tokens and the model's tokenizer {known}"
    if draft.vocab_size != target.vocab_size:
        return 0, f"it has {draft.vocab_size} tokens and the model {target.vocab_size}"
    return both, None


def _tokens(tokenizer: Any) -> dict[int, str] | None:
    """Return the text of each token; None if there is no tokenizer, or it does not say."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    return {token: text for text, token in tokenizer.get_vocab().items()}


def _name(model: Any) -> str:
    return repr(model) if isinstance(model, str) else type(model).__name__
