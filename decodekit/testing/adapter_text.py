"""Whole texts over an adapter: every built-in strategy, and random trees, give the greedy text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from decodekit.decoder.build import build_strategy
from decodekit.decoder.decoder import Decoder
from decodekit.errors import DecodekitError
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import Budget, Proposal, StepOutcome, Strategy
from decodekit.interfaces.tree import TokenTree
from decodekit.testing.laws import law, random_tree
from decodekit.testing.subject import Subject

__all__ = ["check_texts"]

_STRATEGIES = ("autoregressive", "jacobi", "prompt_lookup", "lookahead")
_TOKENS = 20


def check_texts(subject: Subject) -> None:
    """Compare each strategy's tokens with the argmax after the whole text, run anew each time.

    Where two logits are closer than ``atol`` either token is right, and the text is taken as far as
    that.
    """
    prompts = [subject.tokens(length) for length in (1, 6, 11)]
    truths = [_greedy(subject, prompt) for prompt in prompts]
    for prompt, truth in zip(prompts, truths, strict=True):
        built: dict[str, Strategy] = {name: build_strategy(name) for name in _STRATEGIES}
        built["random trees"] = _RandomTrees(subject.adapter.vocab_size, [*prompt, *truth])
        for name, strategy in built.items():
            decoder = Decoder(subject.adapter, strategy=strategy, prefill_chunk=7)
            try:
                tokens = decoder.generate(prompt, max_new_tokens=_TOKENS).tokens
            except DecodekitError as error:
                raise AssertionError(
                    f"broken law: every strategy runs; {name} fails with {error}; prompt {prompt}"
                ) from error
            _compare(subject, prompt, tokens, truth, name)
    decoder = Decoder(subject.adapter, strategy=build_strategy("lookahead"))
    results = decoder.generate(prompts, max_new_tokens=_TOKENS)
    for prompt, truth, result in zip(prompts, truths, results, strict=True):
        _compare(subject, prompt, result.tokens, truth, "lookahead in a batch")


def _greedy(subject: Subject, prompt: Sequence[int]) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < _TOKENS:
        tokens.append(int(subject.alone([*prompt, *tokens]).argmax()))
        if tokens[-1] in subject.adapter.eos_token_ids:
            break
    return tokens


def _compare(
    subject: Subject, prompt: Sequence[int], tokens: list[int], truth: list[int], name: str
) -> None:
    where = f"{name} gives {tokens}, not {truth}, after {list(prompt)}"
    for place, (actual, expected) in enumerate(zip(tokens, truth, strict=False)):
        if actual != expected:
            row = subject.alone([*prompt, *truth[:place]])
            gap = float(row.max() - row[actual])
            law(gap <= subject.atol, "every strategy gives the greedy text", f"{where} ({gap:.3g})")
            return
    law(len(tokens) == len(truth), "every strategy gives the greedy text", where)


class _RandomTrees:
    """A strategy that guesses at random, and every other time the truth among it."""

    max_nodes = 14

    def __init__(self, vocab_size: int, text: list[int]) -> None:
        self._vocab_size = vocab_size
        self._text = text

    def new_proposer(self, params: SamplingParams) -> _RandomTrees:
        """Return itself, as if fresh."""
        self._choose = random.Random(0)
        return self

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        """Return a random tree."""
        trees = [random_tree(self._choose, 9, self._vocab_size)]
        if self._choose.random() < 0.5:
            trees.append(TokenTree.chain(self._text[len(committed) : len(committed) + 5]))
        self._choose.shuffle(trees)
        tree, _ = TokenTree.merge(trees, dedupe=self._choose.random() < 0.5)
        return Proposal(tree.limited(nodes=budget.nodes, depth=budget.depth))

    def observe(self, outcome: StepOutcome) -> None:
        """Learn nothing."""
