"""The whole grid: strategy x {greedy, sampled} x {processors on, off} x backend x batch {1, 3}.

Of ``flash`` a square of cells is tested, of the kernels that are slow without a compiler a few.

Every cell gives the tokens of a loop that knows nothing of decodekit: one full forward pass per
token, transformers' own processors on the whole prefix, argmax or a draw by hand.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from decodekit import Decoder
from decodekit.config.plugins.builtin import decodekit_register_backends
from decodekit.interfaces import Budget, Proposal, StepOutcome
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import TokenTree
from tests.support.attention import NEEDS_TRITON
from tests.support.tiny import VOCABULARY, logits_after, random_prompt, tiny_model

COUNT = 20
PROMPTS = (random_prompt(5, seed=1), random_prompt(17, seed=2), random_prompt(1, seed=3))
SEED = 5
EOS = (7, 11)
KINDS = ("llama", "mistral")  # full attention, and a window that the texts cross


class Oracle:
    """A strategy that knows the true texts; wrong from a random place on, or never.

    Its trees hold the true continuation, corrupted at ``wrong_at`` of it, and random branches.
    """

    max_nodes = 12

    def __init__(self, texts: Sequence[Sequence[int]], *, wrong: bool, seed: int = 0) -> None:
        self.texts = texts
        self.wrong = wrong
        self.random = random.Random(seed)

    def new_proposer(self, params: SamplingParams) -> Oracle:
        return self

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        done = len(committed)
        (text,) = {tuple(text) for text in self.texts if list(text[:done]) == list(committed)}
        chain = list(text[done : done + 6])
        trees = [TokenTree.chain(chain)]
        if self.wrong and chain:
            place = self.random.randrange(len(chain))
            chain[place] = (chain[place] + 1) % VOCABULARY
            noise = [self.random.randrange(VOCABULARY) for _ in range(3)]
            trees = [TokenTree.chain(noise), TokenTree.chain(chain)]
        tree, _ = TokenTree.merge(trees, dedupe=False)
        return Proposal(tree.limited(nodes=budget.nodes, depth=budget.depth))

    def observe(self, outcome: StepOutcome) -> None:
        pass


def draw(scores: torch.Tensor, temperature: float, top_p: float, seed: int, place: int) -> int:
    """Return the winner of the race: probability over an exponential number of seed and place."""
    probs = torch.softmax(scores.double() / temperature, dim=-1).tolist()
    bits = np.random.Philox(key=seed, counter=place << 64).random_raw(len(probs))
    best, winner, mass = 0.0, -1, 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if mass >= top_p:
            break
        mass += probs[token]
        score = probs[token] / -math.log(((int(bits[token]) >> 12) + 0.5) / 2**52)
        if score > best:
            best, winner = score, token
    return winner


@cache
def expected(kind: str, number: int, sampled: bool, processed: bool) -> list[int]:
    """Decode one prompt token by token, without any of decodekit."""
    model = tiny_model(kind)
    prompt = PROMPTS[number]
    processors = LogitsProcessorList()
    if processed:
        processors = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                NoRepeatNGramLogitsProcessor(3),
                MinNewTokensLengthLogitsProcessor(len(prompt), 9, list(EOS), device="cpu"),
            ]
        )
    tokens = list(prompt)
    while len(tokens) < len(prompt) + COUNT:
        scores = processors(torch.tensor([tokens]), logits_after(model, tokens)[None])[0]
        if sampled:
            tokens.append(draw(scores, 0.9, 0.95, SEED + number, len(tokens)))
        else:
            tokens.append(int(scores.argmax()))
        if tokens[-1] in EOS:
            break
    return tokens[len(prompt) :]


def options_of(sampled: bool, processed: bool, number: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": COUNT}
    if sampled:
        options |= {"temperature": 0.9, "top_p": 0.95, "seed": SEED + number}
    if processed:
        options |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 9}
    return options


def decoder_of(kind: str, strategy: Any, backend: Any) -> Decoder:
    decoder = Decoder.from_model(tiny_model(kind), strategy=strategy, backend=backend)
    # The tiny models end no text by themselves; here either of two tokens does.
    decoder.adapter = _Ending(decoder.adapter)  # type: ignore[assignment]
    return decoder


class _Ending:
    """An adapter with end-of-text tokens of our choice."""

    eos_token_ids = frozenset(EOS)

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def strategy_of(name: str, kind: str, sampled: bool, processed: bool, seed: int = 0) -> Any:
    if name == "draft_model":
        draft = tiny_model(kind, seed=1)  # another model: some of its guesses are right
        return {"name": "draft_model", "model": draft, "num_tokens": 3, "branches": [3, 2]}
    if name == "self_draft":
        return {"name": "draft_model", "model": tiny_model(kind), "num_tokens": 4}
    if name in ("oracle", "adversary"):
        texts = [
            [*prompt, *expected(kind, number, sampled, processed), *([0] * 8)]
            for number, prompt in enumerate(PROMPTS)
        ]
        return Oracle(texts, wrong=name == "adversary", seed=seed)
    return name


NAMES = (
    "autoregressive",
    "jacobi",
    "prompt_lookup",
    "lookahead",
    "draft_model",
    "self_draft",
    "oracle",
    "adversary",
)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("processed", [False, True], ids=["plain", "processors"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_equals_the_plain_loop(
    name: str, sampled: bool, processed: bool, backend: str, batch: int
) -> None:
    check_cell(name, sampled, processed, backend, batch)


SQUARE = [
    # Each strategy once, and each two values of the other dimensions in some cell.
    (name, number % 2 == 1, number % 4 > 1, 1 if number in (0, 3, 5, 6) else 3)
    for number, name in enumerate(NAMES)
]
FLEX: dict[str, Any] = {"name": "flex", "compile": False}


@pytest.mark.parametrize("backend", ["flash", "invariant"])
@pytest.mark.parametrize(("name", "sampled", "processed", "batch"), SQUARE)
def test_a_square_of_cells(
    name: str, sampled: bool, processed: bool, batch: int, backend: str
) -> None:
    check_cell(name, sampled, processed, backend, batch)


@pytest.mark.parametrize(
    "backend",
    [pytest.param(FLEX, id="flex"), pytest.param("triton", id="triton", marks=NEEDS_TRITON)],
)
@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        pytest.param(kind, cell, id=f"{cell[0]}-{kind}")
        for kind, cell in zip(("llama", "mistral", "mistral"), SQUARE[-3:], strict=True)
    ],
)
def test_a_few_cells_for_kernels_that_are_slow_without_a_compiler(
    kind: str, cell: tuple[str, bool, bool, int], backend: Any
) -> None:
    name, sampled, processed, batch = cell
    check_cell(name, sampled, processed, backend, batch, kinds=(kind,))


def test_every_backend_has_a_place_in_the_grid() -> None:
    names = {component.name for component in decodekit_register_backends()}
    # "auto" is one or the other of them.
    assert names == {"auto", "eager", "sdpa", "flash", "invariant", "flex", "triton"}
    pairs = {pair for cell in SQUARE for pair in combinations(enumerate(cell[1:]), 2)}
    assert len(pairs) == 3 * 2 * 2


def check_cell(
    name: str,
    sampled: bool,
    processed: bool,
    backend: Any,
    batch: int,
    *,
    kinds: Sequence[str] = KINDS,
) -> None:
    for kind in kinds:
        decoder = decoder_of(kind, strategy_of(name, kind, sampled, processed), backend)
        if batch == 1:
            results = [
                decoder.generate(prompt, **options_of(sampled, processed, number))
                for number, prompt in enumerate(PROMPTS)
            ]
        else:
            requests = [
                decoder.begin(prompt, **options_of(sampled, processed, number))
                for number, prompt in enumerate(PROMPTS)
            ]
            for records in decoder.steps(requests):
                for record in records:
                    requests[record.sequence].add(record)
            results = [request.result for request in requests]
        for number, result in enumerate(results):
            assert result.tokens == expected(kind, number, sampled, processed), (kind, number)
            ended = result.tokens[-1] in EOS
            assert result.finish_reason == ("eos" if ended else "length")
        if name in ("oracle", "self_draft"):
            assert sum(result.stats.steps for result in results) < sum(
                len(result.tokens) for result in results
            ), "nothing was accepted, so nothing was tested"


def test_the_grid_meets_ends_of_text_and_lengths() -> None:
    """Guards the tests above: texts of both kinds of end, and processors that change them."""
    texts = [expected(*cell) for cell in product(KINDS, range(3), (False, True), (False, True))]
    assert any(text[-1] in EOS for text in texts)
    assert any(len(text) == COUNT for text in texts)
    assert expected("llama", 0, False, False) != expected("llama", 0, False, True)
    assert expected("llama", 0, False, False) != expected("llama", 0, True, False)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(KINDS),
    sampled=st.booleans(),
    processed=st.booleans(),
    backend=st.sampled_from(["eager", "flash", "sdpa"]),
    order=st.permutations(range(3)),
    batch=st.integers(1, 3),
    chunk=st.integers(1, 20),
)
def test_any_wrong_guess_changes_nothing(
    seed: int,
    kind: str,
    sampled: bool,
    processed: bool,
    backend: str,
    order: list[int],
    batch: int,
    chunk: int,
) -> None:
    decoder = decoder_of(kind, strategy_of("adversary", kind, sampled, processed, seed), backend)
    decoder.prefill_chunk = chunk
    chosen = order[:batch]
    answers = [
        decoder.begin(PROMPTS[number], **options_of(sampled, processed, number))
        for number in chosen
    ]
    for records in decoder.steps(answers):
        for record in records:
            answers[record.sequence].add(record)
    for number, answer in zip(chosen, answers, strict=True):
        assert answer.result.tokens == expected(kind, number, sampled, processed)
