"""Proposers that are right, wrong or random, and tokenizers.

``ToyAdapter``, the language model without weights, is the one of ``decodekit.testing``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.loop import SequenceState, StepRecord, decode
from decodekit.engine.runner import LocalRunner
from decodekit.engine.stopping import StopRules, cut_run
from decodekit.interfaces import Budget, Proposal, Proposer, StepOutcome, TargetTokens, Verifier
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.testing.toy import ToyAdapter, ToyCache

__all__ = [
    "Acceptance",
    "ByteTokenizer",
    "Given",
    "OracleProposer",
    "PieceTokenizer",
    "RandomProposer",
    "ToyAdapter",
    "ToyCache",
    "cut",
    "decode_one",
    "plain_decode",
    "walked",
    "words",
]


def argmax(logits: Tensor, position: int) -> int:
    """Return the token of the greatest logit, the first of equals."""
    values = logits.tolist()
    return max(range(len(values)), key=lambda token: (values[token], -token))


def plain_decode(
    model: ToyAdapter,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    choose: Callable[[Tensor, int], int] = argmax,
) -> list[int]:
    """Decode token by token, without any of decodekit: what every strategy must give."""
    tokens = list(prompt)
    limit = len(prompt) + max_new_tokens
    if model.max_positions is not None:
        limit = min(limit, model.max_positions)
    while len(tokens) < limit:
        tokens.append(choose(model.logits_after(tokens), len(tokens)))
        if tokens[-1] in model.eos_token_ids:
            break
    return tokens[len(prompt) :]


def decode_one(
    prompt: Sequence[int], *, runner: LocalRunner, max_nodes: int, **parts: Any
) -> Iterator[StepRecord]:
    """Yield the steps of the decode loop over one sequence, made of ``parts``."""
    parts.setdefault("verifier", ExactMatchVerifier())
    state = SequenceState(committed=list(prompt), **parts)
    for records in decode([state], runner=runner, max_nodes=max_nodes):
        (record,) = records
        yield record


class Acceptance(NamedTuple):
    """The nodes that a verifier accepted and the tokens that it yielded, the bonus last."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def walked(verifier: Verifier, proposal: Proposal, target: TargetTokens) -> Acceptance:
    """Return all that a verifier accepts."""
    run = list(verifier.verify(proposal, target))
    assert [node is None for _, node in run] == [False] * (len(run) - 1) + [True]
    *nodes, _ = (node for _, node in run)
    path = proposal.tree.path(nodes[-1]) if nodes else ()
    assert len(path) == len(nodes)
    return Acceptance(path, tuple(token for token, _ in run))


def cut(tokens: Iterable[int], rules: StopRules) -> tuple[int, ...]:
    """Return what the stop rules leave of a run."""
    kept, last, _ = cut_run([(token, None) for token in tokens], rules)
    assert last == ROOT
    return kept


@dataclass
class Given:
    """A strategy whose proposers are made by a function."""

    make: Callable[[], Proposer]
    max_nodes: int = 8

    def new_proposer(self, params: SamplingParams) -> Proposer:
        return self.make()


class _Watcher:
    """A proposer that keeps what it is told, within its budget."""

    def __init__(self) -> None:
        self.budgets: list[Budget] = []
        self.outcomes: list[StepOutcome] = []

    def observe(self, outcome: StepOutcome) -> None:
        assert list(outcome.committed[-len(outcome.tokens) :]) == list(outcome.tokens)
        self.outcomes.append(outcome)


class OracleProposer(_Watcher):
    """Proposes the true continuation as one chain; wrong from one place on, if asked to be.

    Args:
        text: The prompt and its true continuation.
        depth: Nodes of a chain.
        wrong_at: The node whose token is wrong, from 0; None for a chain that is right.
        vocab_size: V, for a wrong token.
    """

    def __init__(
        self, text: Sequence[int], *, depth: int, wrong_at: int | None = None, vocab_size: int = 2
    ) -> None:
        super().__init__()
        self.text = list(text)
        self.depth = depth
        self.wrong_at = wrong_at
        self.vocab_size = vocab_size

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        assert list(committed) == self.text[: len(committed)], "the text so far is not the true one"
        self.budgets.append(budget)
        chain = self.text[len(committed) : len(committed) + self.depth]
        if self.wrong_at is not None and self.wrong_at < len(chain):
            chain[self.wrong_at] = (chain[self.wrong_at] + 1) % self.vocab_size
        return Proposal(TokenTree.chain(chain).limited(nodes=budget.nodes, depth=budget.depth))


class RandomProposer(_Watcher):
    """Proposes random trees, with duplicate siblings and, if ``text`` is given, a true branch.

    Args:
        seed: Of its own generator.
        vocab_size: V.
        nodes: Most random nodes of a tree.
        text: The prompt and its true continuation, mixed into every other tree.
    """

    def __init__(
        self, *, seed: int, vocab_size: int, nodes: int, text: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.vocab_size = vocab_size
        self.nodes = nodes
        self.text = text

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        self.budgets.append(budget)
        size = self.random.randint(0, self.nodes)
        trees = [
            TokenTree(
                tuple(self.random.randrange(self.vocab_size) for _ in range(size)),
                tuple(self.random.randrange(-1, node) for node in range(size)),
            )
        ]
        if self.text is not None and self.random.random() < 0.5:
            start = len(committed)
            trees.append(TokenTree.chain(self.text[start : start + self.random.randint(1, 4)]))
        self.random.shuffle(trees)
        tree, _ = TokenTree.merge(trees, dedupe=self.random.random() < 0.5)
        return Proposal(tree.limited(nodes=budget.nodes, depth=budget.depth))


class ByteTokenizer:
    """Tokens are runs of bytes, as in GPT-2, LLaMA 3 and Qwen; a character may span several.

    Args:
        pieces: The bytes of each token.
        special: Tokens that ``skip_special_tokens`` leaves out.
        clean_up: Whether a space before a punctuation mark is dropped, unless the caller says no.
    """

    def __init__(
        self, pieces: Sequence[bytes], *, special: Iterable[int] = (), clean_up: bool = False
    ) -> None:
        self.pieces = list(pieces)
        self.special = frozenset(special)
        self.clean_up = clean_up

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t in self.special)]
        text = b"".join(self.pieces[token] for token in kept).decode("utf-8", "replace")
        clean = clean_up_tokenization_spaces
        if self.clean_up if clean is None else clean:
            for mark in (".", ",", "!", "?", "n't", "'s"):
                text = text.replace(f" {mark}", mark)
        return text


def words(count: int = 11) -> ByteTokenizer:
    """Return a tokenizer whose token ``i`` is ``<i>``."""
    return ByteTokenizer([f"<{i}>".encode() for i in range(count)])


class PieceTokenizer:
    """Tokens are pieces of text with ``▁`` for a space, as in LLaMA 2 and Mistral.

    The space at the start of a text is dropped. ``<0xE2>`` is a byte; a run of bytes that is not
    whole characters is broken as a whole.

    Args:
        pieces: The text of each token.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **options: Any
    ) -> str:
        text = ""
        run = b""
        for piece in [*(self.pieces[token] for token in token_ids), ""]:
            if piece.startswith("<0x"):
                run += bytes([int(piece[3:5], 16)])
                continue
            try:
                text += run.decode("utf-8")
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            text += piece.replace("▁", " ")
        return text.removeprefix(" ")
