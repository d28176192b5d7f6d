"""The laws of a strategy and its proposers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from decodekit.decoder.decoder import Decoder
from decodekit.interfaces.adapter import ModelAdapter
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import (
    Budget,
    NeedsTarget,
    Proposal,
    Proposer,
    StepOutcome,
    Strategy,
)
from decodekit.interfaces.tree import TokenTree
from decodekit.strategies.autoregressive import Autoregressive, AutoregressiveConfig
from decodekit.testing.laws import generators, law, random_tokens
from decodekit.testing.toy import ToyAdapter

__all__ = ["check_proposer"]

_MODES = ("whole", "no nodes", "no depth", "random")
"""How a budget is narrowed before the proposer sees it."""


def check_proposer(
    strategy: Strategy,
    *,
    adapter: ModelAdapter | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 24,
    seed: int = 0,
) -> None:
    """Check a strategy: it keeps to its budgets, and the text is that of plain decoding.

    Its proposers run in the decode loop, greedy and sampled, over texts that repeat themselves and
    texts that do not, with budgets down to nothing.

    Args:
        strategy: What is checked, as it was built.
        adapter: The model that it guesses for, with at least 64 positions; None for three toy
            models of 11 tokens.
        tokenizer: For a strategy that asks for one.
        max_new_tokens: Of each text.
        seed: Of prompts and budgets.

    Raises:
        AssertionError: A law is broken; which, and on what input.
    """
    law(isinstance(strategy, Strategy), "a strategy has max_nodes and new_proposer", repr(strategy))
    law(
        isinstance(strategy.max_nodes, int) and strategy.max_nodes >= 0,
        "max_nodes is a number of nodes",
        f"it is {strategy.max_nodes!r}",
    )
    choose = random.Random(seed)
    models = [adapter] if adapter is not None else [ToyAdapter(context=n) for n in (1, 2, None)]
    for model in models:
        attached = strategy
        if isinstance(strategy, NeedsTarget):
            attached = strategy.attached(model, tokenizer)
        for length in (1, 2, 17):
            prompt = random_tokens(choose, length, model.vocab_size)
            for mode in _MODES:
                for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=length)):
                    _check_text(attached, model, [*prompt], params, mode, max_new_tokens)
        _check_independence(attached, model, choose, max_new_tokens)


class _Watched:
    """A strategy whose proposers are watched at every call."""

    def __init__(self, strategy: Strategy, vocab_size: int, mode: str) -> None:
        self._strategy = strategy
        self._vocab_size = vocab_size
        self._mode = mode
        self.max_nodes = strategy.max_nodes
        self.trees: list[list[TokenTree]] = []  # of each proposer

    def new_proposer(self, params: SamplingParams) -> Proposer:
        """Return a watched proposer."""
        proposer = self._strategy.new_proposer(params)
        law(isinstance(proposer, Proposer), "a proposer has propose and observe", repr(proposer))
        self.trees.append([])
        return _WatchedProposer(proposer, self._vocab_size, self._mode, self.trees[-1])


class _WatchedProposer:
    """A proposer that is watched at every call, under narrowed budgets."""

    def __init__(
        self, proposer: Proposer, vocab_size: int, mode: str, trees: list[TokenTree]
    ) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._mode = mode
        self._trees = trees
        self._choose = random.Random(len(mode))
        self._last: Proposal | None = None

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return the proposal, if it breaks no law."""
        budget = self._narrowed(budget)
        before = tuple(committed)
        where = f"{budget}, committed {before}"
        state = generators()
        try:
            proposal = self._proposer.propose(committed, budget)
        except Exception as error:
            raise AssertionError(
                f"broken law: propose does not raise; {type(error).__name__}: {error}; {where}"
            ) from error
        law(tuple(committed) == before, "propose does not change committed", where)
        law(
            generators() == state,
            "the global random generators are left alone",
            where,
        )
        law(
            isinstance(proposal, Proposal),
            "propose returns a Proposal",
            f"got {proposal!r}; {where}",
        )
        tree = proposal.tree
        where = f"tokens {tree.tokens}, parents {tree.parents}, {where}"
        law(len(tree) <= budget.nodes, "a proposal keeps to budget.nodes", where)
        law(max(tree.depths, default=0) <= budget.depth, "it keeps to budget.depth", where)
        law(
            all(isinstance(one, int) and 0 <= one < self._vocab_size for one in tree.tokens),
            f"its tokens are whole numbers from 0 to {self._vocab_size - 1}",
            where,
        )
        self._check_probabilities(proposal, where)
        self._trees.append(tree)
        self._last = proposal
        return proposal

    def observe(self, outcome: StepOutcome) -> None:
        """Let the proposer learn."""
        law(outcome.proposal is self._last, "observe is about the last proposal", repr(outcome))
        before = tuple(outcome.committed)
        try:
            self._proposer.observe(outcome)
        except Exception as error:
            raise AssertionError(
                f"broken law: observe does not raise; {type(error).__name__}: {error}; "
                f"accepted {outcome.accepted}, tokens {outcome.tokens}, committed {before}"
            ) from error
        after = tuple(outcome.committed)
        law(after == before, "observe does not change committed", f"{before} became {after}")

    def _narrowed(self, budget: Budget) -> Budget:
        nodes, depth = budget.nodes, budget.depth
        if self._mode == "no nodes":
            nodes = 0
        elif self._mode == "no depth":
            depth = 0
        elif self._mode == "random":
            nodes = self._choose.randint(0, nodes)
            depth = self._choose.randint(0, min(depth, 6))
        return Budget(nodes=nodes, depth=depth, tokens=budget.tokens)

    def _check_probabilities(self, proposal: Proposal, where: str) -> None:
        probs = proposal.draft_probs
        if probs is None:
            return
        tokens = proposal.tree.tokens
        law(
            tuple(probs.shape) == (len(tokens), self._vocab_size),
            "draft_probs are [T, V]",
            f"they are {list(probs.shape)}; {where}",
        )
        sums = probs.double().sum(dim=-1)
        fine = bool((probs >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())
        law(fine, "draft_probs are distributions", f"their sums are {sums.tolist()}; {where}")
        own = [float(probs[node, token]) for node, token in enumerate(tokens)]
        law(min(own, default=1) > 0, "a drawn token has a probability", f"{own}; {where}")


def _decoder(model: ModelAdapter, strategy: Strategy) -> Decoder:
    return Decoder(model, strategy=strategy)


def _check_text(
    strategy: Strategy,
    model: ModelAdapter,
    prompt: list[int],
    params: SamplingParams,
    mode: str,
    max_new_tokens: int,
) -> None:
    """Check that the text is that of plain decoding."""
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
    }
    plain = _decoder(model, Autoregressive(AutoregressiveConfig()))
    expected = plain.generate(prompt, **options).tokens
    watched = _Watched(strategy, model.vocab_size, mode)
    actual = _decoder(model, watched).generate(prompt, **options).tokens
    law(
        actual == expected,
        "the text is that of plain decoding",
        f"{actual}, not {expected}; prompt {prompt}, {params}, budgets: {mode}",
    )


def _check_independence(
    strategy: Strategy, model: ModelAdapter, choose: random.Random, max_new_tokens: int
) -> None:
    """Check that what a proposer guesses depends on its own sequence alone."""
    prompts = [[*random_tokens(choose, length, model.vocab_size)] * 2 for length in (4, 7)]
    alone: list[list[TokenTree]] = []
    for prompt in prompts:
        watched = _Watched(strategy, model.vocab_size, "whole")
        _decoder(model, watched).generate(prompt, max_new_tokens=max_new_tokens)
        alone += watched.trees
    watched = _Watched(strategy, model.vocab_size, "whole")
    decoder = _decoder(model, watched)
    streams = [decoder.stream(prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
    while [chunk for chunk in (next(stream, None) for stream in streams) if chunk is not None]:
        pass  # one step of each in turn
    for prompt, mine, together in zip(prompts, alone, watched.trees, strict=True):
        pairs = enumerate(zip(mine, together, strict=False))
        step = next((number for number, (one, other) in pairs if one != other), None)
        law(
            mine == together,
            "a proposer guesses the same beside another one",
            f"prompt {prompt}, from step {step} on; the other prompts: {prompts}",
        )
