"""A batch gives each prompt what it gets alone: tokens, text, stops, steps, log-probabilities."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit import Decoder, GenerationResult
from decodekit.adapters.hf.cache import HFCache
from decodekit.adapters.llama.cache import LlamaCache
from decodekit.decoder.build import build_adapter, build_strategy
from decodekit.decoder.request import Request
from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.rejection import RejectionVerifier
from decodekit.errors import ConfigError, GenerationError
from decodekit.interfaces import Proposer
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.strategies.autoregressive import Autoregressive
from tests.support.checkpoint import save_checkpoint
from tests.support.fakes import (
    ByteTokenizer,
    OracleProposer,
    RandomProposer,
    ToyAdapter,
    ToyCache,
    plain_decode,
)
from tests.support.tiny import WINDOW, greedy_loop, logits_after, random_prompt, tiny_model

STRATEGIES: list[Any] = [
    "autoregressive",
    "jacobi",
    "prompt_lookup",
    "lookahead",
    {"name": "lookahead", "window_size": 7, "ngram_size": 5, "max_candidates": 7},
    {"name": "lookahead", "realign": True},
]
KINDS = ["llama", "mistral", "qwen2", "gpt2", "gemma2"]
MODELS = [
    (kind, backend)
    for kind in KINDS
    for backend in ("eager", "flash", "sdpa")
    if kind != "gemma2" or backend == "eager"  # the others refuse: they cannot do softcapping
]
ADAPTERS = [(kind, "hf") for kind in KINDS] + [(kind, "llama") for kind in KINDS[:3]]
V = 11  # tokens of a toy
PROMPTS = [[3, 1, 4, 1, 5], [7], [2, 2, 9, 2, 2, 9, 2], [10, 0], [6, 5, 6, 5, 6]]


def toy(model: ToyAdapter, strategy: Any = "lookahead", **settings: Any) -> Decoder:
    settings.setdefault("tokenizer", words())
    return Decoder(model, strategy=build_strategy(strategy), **settings)


def words() -> ByteTokenizer:
    """Return a tokenizer whose token ``i`` is ``<i>``."""
    return ByteTokenizer([f"<{i}>".encode() for i in range(V)])


def facts(result: GenerationResult) -> dict[str, Any]:
    """Return all of a result but the times."""
    return {
        "tokens": result.tokens,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "logprobs": result.logprobs,
        "steps": result.stats.steps,
        "nodes": result.stats.nodes,
        "stats.tokens": result.stats.tokens,
    }


def alone(make: Callable[[], Decoder], prompts: Iterable[Any], **options: Any) -> list[Any]:
    """Return the facts of each prompt on a decoder of its own."""
    return [facts(make().generate(prompt, **options)) for prompt in prompts]


def together(decoder: Decoder, prompts: Sequence[Any], **options: Any) -> list[Any]:
    results = decoder.generate(list(prompts), **options)
    assert isinstance(results, list)
    return [facts(result) for result in results]


# --- real models ---------------------------------------------------------------------------------


def requests(mode: str) -> list[Request]:
    """Return prompts of 1 to 40 tokens, greedy, sampled, or each in its own way."""
    sampled = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed) for seed in range(5)]
    greedy = [SamplingParams()] * 5
    counts = {"mixed": (24, 5, 0, 31, 17)}.get(mode, (24,) * 5)
    choices = {
        "greedy": greedy,
        "sampled": sampled,
        "mixed": [*sampled[:2], *greedy[:2], SamplingParams(repetition_penalty=1.5)],
    }[mode]
    return [
        Request(random_prompt(length, seed=length), sampling=params, max_new_tokens=count)
        for length, params, count in zip((1, 40, 7, 22, 13), choices, counts, strict=True)
    ]


@cache
def single_texts(kind: str, backend: str, mode: str) -> list[list[int]]:
    """Return what autoregressive decoding makes of each prompt alone."""
    decoder = Decoder.from_model(tiny_model(kind), strategy="autoregressive", backend=backend)
    texts = [decoder.generate(request).tokens for request in requests(mode)]
    if mode == "greedy":
        for request, text in zip(requests(mode), texts, strict=True):
            assert text == greedy_loop(tiny_model(kind), request.prompt, 24)
    return texts


@pytest.mark.parametrize("mode", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(("kind", "backend"), MODELS)
def test_a_batch_equals_single_runs(kind: str, backend: str, strategy: Any, mode: str) -> None:
    # Crossed, so that both adapters and both backends have their turn.
    decoder = Decoder.from_model(
        tiny_model(kind),
        strategy=strategy,
        adapter="hf" if backend == "eager" else "auto",
        backend=backend,
        prefill_chunk=6,
    )
    results = decoder.generate(requests(mode))
    assert [result.tokens for result in results] == single_texts(kind, backend, mode)
    counts = [request.max_new_tokens for request in requests(mode)]
    assert [result.stats.tokens for result in results] == counts


def test_the_texts_of_these_batches_differ() -> None:
    """Guards the test above against models that say one thing whatever they are asked."""
    for kind, backend in MODELS:
        if kind != "gemma2":  # this one repeats a single token
            for mode in ("greedy", "sampled"):
                texts = single_texts(kind, backend, mode)
                assert len({tuple(text) for text in texts}) == 5
            assert single_texts(kind, backend, "sampled") != single_texts(kind, backend, "greedy")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(("kind", "backend"), MODELS)
def test_each_sequence_has_its_own_stop_tokens(kind: str, backend: str, strategy: Any) -> None:
    prompts = [request.prompt for request in requests("greedy")]
    texts = single_texts(kind, backend, "greedy")
    stops: list[Any] = [[text[place]] for place, text in zip((0, 9, 4), texts, strict=False)]
    stops += [[texts[3][5:7]], None]  # a run of two tokens, and none
    expected = [
        *(text[: text.index(stop[0]) + 1] for text, stop in zip(texts, stops[:3], strict=False)),
        texts[3][: next(i for i in range(24) if texts[3][i : i + 2] == stops[3][0]) + 2],
        texts[4],
    ]
    decoder = Decoder.from_model(tiny_model(kind), strategy=strategy, backend=backend)
    results = decoder.generate(
        [Request(prompt, stop_token_ids=stop) for prompt, stop in zip(prompts, stops, strict=True)],
        max_new_tokens=24,
    )
    assert [result.tokens for result in results] == expected
    assert [result.finish_reason for result in results] == ["stop"] * 4 + ["length"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_one_sequence_ends_at_the_last_position_and_the_others_go_on(
    kind: str, strategy: Any
) -> None:
    model = tiny_model(kind)  # of 128 positions
    prompts = [random_prompt(length, seed=length) for length in (126, 3, 127, 100)]
    decoder = Decoder.from_model(model, strategy=strategy, prefill_chunk=30)
    results = decoder.generate(prompts, max_new_tokens=20)
    reasons = [result.finish_reason for result in results]
    assert reasons == ["capacity", "length", "capacity", "length"]
    for prompt, count, result in zip(prompts, (2, 20, 1, 20), results, strict=True):
        assert result.tokens == greedy_loop(model, prompt, count)


@pytest.mark.parametrize(("kind", "backend"), MODELS)
def test_batches_and_single_requests_take_turns_on_one_decoder(kind: str, backend: str) -> None:
    """The memory of a batch is taken again after sequences have left it."""
    model = tiny_model(kind)
    decoder = Decoder.from_model(model, backend=backend, prefill_chunk=9)
    mixed, texts = requests("mixed"), single_texts(kind, backend, "mixed")
    for members in ([0, 1, 2, 3, 4], [3], [1], [4, 3, 2, 1, 0], [0, 4], [3, 1], [2], [1, 0, 3]):
        results = decoder.generate([mixed[member] for member in members])
        assert [result.tokens for result in results] == [texts[member] for member in members]


@pytest.mark.parametrize(("kind", "backend"), MODELS)
def test_log_probabilities_of_a_batch_are_the_models_own(kind: str, backend: str) -> None:
    model = tiny_model(kind)
    counts = [2, None, 0, 64, 1]
    asked = [
        Request(request.prompt, logprobs=count)
        for request, count in zip(requests("greedy"), counts, strict=True)
    ]
    results = Decoder.from_model(model, backend=backend).generate(asked, max_new_tokens=8)
    for request, result in zip(asked, results, strict=True):
        if request.logprobs is None:
            assert result.logprobs is None
            continue
        assert [entry.token for entry in result.logprobs] == result.tokens
        for place, entry in enumerate(result.logprobs):
            row = logits_after(model, [*request.prompt, *result.tokens[:place]]).log_softmax(-1)
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
            best = row.topk(request.logprobs).values.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-3)


def test_the_forms_of_a_prompt_may_be_mixed(tmp_path: Path) -> None:
    decoder = Decoder.from_config(model=save_checkpoint(tmp_path), max_new_tokens=7)
    prompts: list[Any] = [
        "a b c",
        [5, 6, 7],
        torch.tensor([[8, 9]]),
        [{"role": "user", "content": "x y"}],
        Request("d e f", chat=False, max_new_tokens=3),
    ]
    expected = [decoder.generate(prompt) for prompt in prompts]
    for batch in (prompts, tuple(prompts), [prompts[1], prompts[0], *prompts[2:]]):
        results = decoder.generate(batch)
        by_prompt = {tuple(result.prompt_tokens): result for result in results}
        for one in expected:
            other = by_prompt[tuple(one.prompt_tokens)]
            assert (other.tokens, other.text) == (one.tokens, one.text)
    chats = decoder.generate([prompts[3], prompts[3]])
    assert [chat.tokens for chat in chats] == [expected[3].tokens] * 2


# --- a toy, where all can be known ---------------------------------------------------------------


class InTurn:
    """A strategy whose sequences have the proposers of a list, in its order."""

    max_nodes = 16

    def __init__(self, makes: Sequence[Callable[[], Proposer]]) -> None:
        self._makes = iter(makes)

    def new_proposer(self, params: SamplingParams) -> Proposer:
        return next(self._makes)()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 39, 512])
def test_prompts_of_every_length_in_one_batch(chunk: int, strategy: Any) -> None:
    model = ToyAdapter(context=2)
    prompts = [random_prompt(length, seed=length) for length in range(40, 0, -1)]
    prompts = [[token % V for token in prompt] for prompt in prompts]
    results = together(toy(model, strategy, prefill_chunk=chunk), prompts, max_new_tokens=6)
    for prompt, result in zip(prompts, results, strict=True):
        assert result["tokens"] == plain_decode(model, prompt, max_new_tokens=6)
        assert result["prompt_tokens"] == prompt
    largest = max(len(plan.pending) for plans in model.forwards for plan in plans)
    assert largest == min(chunk, 40)


@pytest.mark.parametrize("verifier", [ExactMatchVerifier, RejectionVerifier])
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_sequence_takes_the_steps_that_it_takes_alone(
    strategy: Any, temperature: float, verifier: type
) -> None:
    model = ToyAdapter(context=2)

    def make() -> Decoder:
        return toy(model, strategy, verifier=verifier(), prefill_chunk=3)

    asked = [
        Request(prompt, sampling=SamplingParams(temperature=temperature, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
    ]
    assert together(make(), asked, max_new_tokens=25) == alone(make, asked, max_new_tokens=25)


def test_runs_of_every_length_side_by_side() -> None:
    """One proposer is always right, others are wrong somewhere: they share nothing but the pass."""
    model = ToyAdapter()
    texts = [prompt + plain_decode(model, prompt, max_new_tokens=40) for prompt in PROMPTS]
    oracle = partial(OracleProposer, depth=4, vocab_size=V)
    strategy = InTurn(
        [
            partial(oracle, texts[0]),
            partial(oracle, texts[1], wrong_at=0),
            partial(oracle, texts[2], wrong_at=2),
            Autoregressive,
            partial(RandomProposer, seed=1, vocab_size=V, nodes=9, text=texts[4]),
        ]
    )
    results = Decoder(model, strategy=strategy).generate(PROMPTS, max_new_tokens=30)
    for prompt, text, result in zip(PROMPTS, texts, results, strict=True):
        assert result.tokens == text[len(prompt) :][:30]
    assert [result.stats.steps for result in results[:4]] == [6, 30, 10, 30]
    assert [result.stats.nodes for result in results[:4]] == [6 * 4, 30 * 4, 10 * 4, 0]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("chunk", [3, 512])
def test_a_sequence_that_ends_leaves_the_batch(strategy: Any, chunk: int) -> None:
    model = ToyAdapter(context=2)
    counts = [9, 1, 0, 4, 17]
    asked = [
        Request(prompt, max_new_tokens=count) for prompt, count in zip(PROMPTS, counts, strict=True)
    ]
    results = toy(model, strategy, prefill_chunk=chunk).generate(asked)
    assert [len(result.tokens) for result in results] == counts
    steps = [result.stats.steps for result in results]
    sizes = [sum(count > step for count in steps) for step in range(max(steps))]
    assert (sizes[0], sizes[-1], steps[2]) == (4, 1, 0)
    assert len(set(sizes)) >= 3
    longest = max(len(prompt) for prompt, count in zip(PROMPTS, counts, strict=True) if count)
    prefill = [4] * (-(-longest // chunk) - 1)
    assert [len(plans) for plans in model.forwards] == prefill + sizes


def test_times_are_those_of_the_passes_that_a_sequence_took_part_in() -> None:
    asked = [Request(p, max_new_tokens=n) for p, n in zip(PROMPTS, (9, 1, 0, 4, 17), strict=True)]
    stats = [result.stats for result in toy(ToyAdapter(), "autoregressive").generate(asked)]
    none, *some = sorted(stats, key=lambda one: one.tokens)
    assert (none.seconds, none.forward_seconds, none.time_to_first_token) == (0, 0, 0)
    assert [one.tokens for one in some] == [one.steps for one in some] == [1, 4, 9, 17]
    for shorter, longer in pairwise(some):
        assert shorter.forward_seconds < longer.forward_seconds
    for one in some:
        assert 0 < one.forward_seconds < one.seconds
        assert (one.time_to_first_token < one.seconds) == (one.steps > 1)
    # They share the first pass.
    assert some[0].forward_seconds < min(one.time_to_first_token for one in some)


@pytest.mark.parametrize("end", ["eos", "stop", "criterion", "capacity"])
def test_whatever_ends_a_sequence_it_leaves_the_batch(end: str) -> None:
    free = ToyAdapter()
    texts = [plain_decode(free, prompt, max_new_tokens=40) for prompt in PROMPTS]
    asked: list[Any] = list(PROMPTS)
    model = free
    if end == "eos":
        model = ToyAdapter(eos=[texts[0][3]])
    elif end == "stop":
        asked[0] = Request(PROMPTS[0], stop=f"<{texts[0][2]}><{texts[0][3]}>")
    elif end == "criterion":
        asked[0] = Request(PROMPTS[0], stopping_criteria=lambda ids, _: ids.shape[1] >= 9)
    else:
        model = ToyAdapter(max_positions=20)
        asked[0] = (PROMPTS[0] * 4)[:17]

    def make() -> Decoder:
        return toy(model, "jacobi")

    expected = alone(make, asked, max_new_tokens=12)
    del model.forwards[:]
    results = together(make(), asked, max_new_tokens=12)
    assert results == expected
    assert results[0]["finish_reason"] == {"criterion": "stop"}.get(end, end)
    assert len(results[0]["tokens"]) < 12
    sizes = [len(plans) for plans in model.forwards]
    assert sizes == [sum(r["steps"] > step for r in results) for step in range(len(sizes))]


def test_nothing_is_run_for_a_batch_of_nothing_to_say() -> None:
    model = ToyAdapter()
    results = toy(model).generate(PROMPTS, max_new_tokens=0)
    assert [(r.tokens, r.text, r.finish_reason) for r in results] == [([], "", "length")] * 5
    assert [result.stats.steps for result in results] == [0] * 5
    assert model.forwards == []
    assert model.caches == []


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("limit", [22, 23, 24, 30])
def test_the_tree_of_one_sequence_shrinks_at_the_last_positions(limit: int, strategy: Any) -> None:
    """Its neighbours have room, and the cache is as large as they need."""
    model = ToyAdapter(context=2, max_positions=limit)
    lengths = (21, 3, 20, 1, 11)
    prompts = [(PROMPTS[0] * 5)[place : place + length] for place, length in enumerate(lengths)]

    def make() -> Decoder:
        return toy(model, strategy, prefill_chunk=5)

    results = together(make(), prompts, max_new_tokens=15)
    assert results == alone(make, prompts, max_new_tokens=15)
    assert {result["finish_reason"] for result in results} == {"capacity", "length"}
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result["tokens"]) == min(15, limit - len(prompt))


def test_seeds_and_equal_prompts() -> None:
    model = ToyAdapter()
    asked = [Request([5, 6], sampling=SamplingParams(temperature=1.0, seed=s)) for s in (1, 2, 1)]
    one, other, again = (r.tokens for r in toy(model).generate(asked, max_new_tokens=20))
    assert one == again != other
    # Options go before what the requests say, and hold for all of them.
    results = toy(model).generate(asked, max_new_tokens=20, seed=2)
    assert [result.tokens for result in results] == [other] * 3
    results = toy(model).generate([[5, 6], [5, 6]], max_new_tokens=20, temperature=1.0, seed=1)
    assert [result.tokens for result in results] == [one] * 2


class Parity:
    """A constraint: even and odd tokens take turns."""

    def __init__(self, *, odd: bool) -> None:
        self.odd = odd

    def fork(self) -> Parity:
        return Parity(odd=self.odd)

    def advance(self, token: int) -> bool:
        allowed = token % 2 == self.odd
        self.odd ^= allowed
        return allowed

    def mask(self) -> Tensor:
        return torch.arange(V) % 2 == int(self.odd)


class Counting:
    """A processor with a state: bans token k before the k-th new one, modulo V."""

    calls = 0

    def fork(self) -> Counting:
        return copy.copy(self)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        banned = torch.tensor([self.calls % V])
        self.calls += 1
        return scores.index_fill(1, banned, float("-inf"))


def no_neighbours(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Ban the tokens around the last one."""
    last = int(input_ids[0, -1])
    banned = torch.tensor([(last + 1) % V, last, (last - 1) % V])
    return scores.index_fill(1, banned, float("-inf"))


@pytest.mark.parametrize("verifier", [ExactMatchVerifier, RejectionVerifier])
@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_each_sequence_has_its_own_processors_and_constraint(
    strategy: Any, temperature: float, verifier: type
) -> None:
    model = ToyAdapter(context=2)
    prompt = PROMPTS[0]
    counting, even, odd = Counting(), Parity(odd=False), Parity(odd=True)
    asked = [
        Request(prompt, sampling=SamplingParams(seed=1)),
        Request(prompt, constraint=even),
        Request(prompt, constraint=odd, logits_processor=no_neighbours),
        Request(prompt, logits_processor=[counting]),
        Request(prompt, sampling=SamplingParams(suppress_tokens=[0, 1, 2], repetition_penalty=2.0)),
    ]

    def make() -> Decoder:
        return toy(model, strategy, verifier=verifier())

    options = {"max_new_tokens": 24, "temperature": temperature}
    results = together(make(), asked, **options)
    assert results == alone(make, asked, **options)
    texts = [result["tokens"] for result in results]
    assert len(set(map(tuple, texts))) == 5
    assert [token % 2 for token in texts[1]] == [0, 1] * 12
    assert [token % 2 for token in texts[2]] == [1, 0] * 12
    far = [abs(a - b) for a, b in zip([prompt[-1], *texts[2]], texts[2], strict=False)]
    assert {0, 1, V - 1}.isdisjoint(far)
    assert all(token != place % V for place, token in enumerate(texts[3]))
    assert min(texts[4]) > 2
    # What the caller gave is in its starting state still.
    assert (counting.calls, even.odd, odd.odd) == (0, False, True)


def test_one_constraint_for_the_whole_batch_is_followed_by_each_on_its_own() -> None:
    model = ToyAdapter()
    rule = Parity(odd=True)
    results = toy(model).generate(PROMPTS, max_new_tokens=9, constraint=rule)
    for result in results:
        assert [token % 2 for token in result.tokens] == [1, 0] * 4 + [1]


def test_stops_and_texts_are_each_sequences_own() -> None:
    model = ToyAdapter()
    texts = [plain_decode(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    stops = [f"<{text[place]}>" for place, text in zip((0, 3, 6, 9, 12), texts, strict=True)]
    asked = [Request(p, stop=stop) for p, stop in zip(PROMPTS, stops, strict=True)]
    results = toy(model, "jacobi").generate(asked, max_new_tokens=20)
    for text, stop, result in zip(texts, stops, results, strict=True):
        whole = words().decode(text)
        assert result.text == whole[: whole.index(stop)]
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_criterion_is_asked_about_every_token_of_its_own_sequence(strategy: Any) -> None:
    model = ToyAdapter(context=2)
    asked: list[list[list[int]]] = [[] for _ in PROMPTS]

    def keep(into: list[list[int]], ids: Tensor, scores: None) -> bool:
        into.append(ids[0].tolist())
        return len(into) == 12

    results = toy(model, strategy).generate(
        [
            Request(prompt, stopping_criteria=partial(keep, into))
            for prompt, into in zip(PROMPTS, asked, strict=True)
        ],
        max_new_tokens=20,
    )
    for prompt, ids, result in zip(PROMPTS, asked, results, strict=True):
        text = prompt + plain_decode(model, prompt, max_new_tokens=12)
        assert ids == [text[: len(prompt) + count] for count in range(1, 13)]
        assert prompt + result.tokens == text
        assert result.finish_reason == "stop"


@st.composite
def any_request(draw: st.DrawFn) -> Request:
    token = st.integers(0, V - 1)
    return Request(
        draw(st.lists(token, min_size=1, max_size=40)),
        max_new_tokens=draw(st.integers(0, 12)),
        sampling=SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.9])),
            seed=draw(st.integers(0, 2**64 - 1)),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            min_new_tokens=draw(st.integers(0, 3)),
        ),
        stop=draw(st.sampled_from([None, "<3>", ["><7", "0><"]])),
        stop_token_ids=draw(st.none() | st.lists(st.lists(token, min_size=1, max_size=2))),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    )


@settings(max_examples=200)
@given(
    asked=st.lists(any_request(), min_size=1, max_size=6),
    strategy=st.sampled_from(STRATEGIES),
    verifier=st.sampled_from([ExactMatchVerifier, RejectionVerifier]),
    context=st.sampled_from([None, 1, 2]),
    limit=st.sampled_from([None, 41, 46]),
    eos=st.sets(st.integers(0, V - 1), max_size=2),
    chunk=st.integers(1, 45),
)
def test_any_batch_equals_single_runs(
    asked: list[Request],
    strategy: Any,
    verifier: type,
    context: int | None,
    limit: int | None,
    eos: set[int],
    chunk: int,
) -> None:
    def make(chunk: int = chunk) -> Decoder:
        model = ToyAdapter(V, context=context, max_positions=limit, eos=eos)
        return toy(model, strategy, verifier=verifier(), prefill_chunk=chunk)

    expected = alone(partial(make, 512), asked)
    decoder = make()
    assert together(decoder, asked) == expected
    # Once more, on the memory that the batch has left behind, and in another order.
    assert together(decoder, asked[::-1]) == expected[::-1]
    assert [facts(decoder.generate(request)) for request in asked] == expected


# --- one decoder, many batches -------------------------------------------------------------------


def test_the_memory_of_a_batch_is_taken_again() -> None:
    model = ToyAdapter()
    decoder = toy(model, "autoregressive")
    for _ in range(3):
        decoder.generate(PROMPTS, max_new_tokens=8)
    assert len(model.caches) == 1
    counts = (9, 1, 2, 4, 17)
    asked = [Request(p, max_new_tokens=n) for p, n in zip(PROMPTS, counts, strict=True)]
    decoder.generate(asked)
    made = len(model.caches)
    decoder.generate(asked)  # the places of those that left are there again
    assert len(model.caches) == made
    result = decoder.generate(PROMPTS[0], max_new_tokens=9)
    assert result.tokens == plain_decode(model, PROMPTS[0], max_new_tokens=9)


@pytest.mark.parametrize("at", range(8))
def test_a_decoder_goes_on_after_a_batch_was_interrupted(at: int) -> None:
    class Interrupted(ToyAdapter):
        """Fails in the middle of a pass, as if Ctrl-C had been pressed."""

        def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
            logits = super().forward(plans, cache)
            if len(self.forwards) == at + 1:
                raise KeyboardInterrupt
            return logits

    model = Interrupted()
    decoder = toy(model, "jacobi", prefill_chunk=3)
    asked = [Request(p, max_new_tokens=n) for p, n in zip(PROMPTS, (9, 1, 2, 4, 9), strict=True)]
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(asked)
    assert decoder.generate([3, 1], max_new_tokens=9).tokens == plain_decode(
        model, [3, 1], max_new_tokens=9
    )
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, max_new_tokens=9), strict=True):
        assert result.tokens == plain_decode(model, prompt, max_new_tokens=9)


# --- forms and mistakes --------------------------------------------------------------------------


def test_a_list_of_one_prompt_is_a_batch_of_one() -> None:
    results = toy(ToyAdapter()).generate([PROMPTS[0]], max_new_tokens=7)
    assert isinstance(results, list)
    (result,) = results
    assert result.tokens == plain_decode(ToyAdapter(), PROMPTS[0], max_new_tokens=7)


def test_a_list_of_numbers_is_one_prompt() -> None:
    result = toy(ToyAdapter()).generate(PROMPTS[0], max_new_tokens=7)
    assert isinstance(result, GenerationResult)


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_list_is_said_to_be_empty(empty: Any) -> None:
    model = ToyAdapter()
    with pytest.raises(GenerationError, match="the list is empty; give a prompt, or a list of pr"):
        toy(model).generate(empty)
    assert model.forwards == []


@pytest.mark.parametrize(
    ("prompts", "number", "message"),
    [
        ([[1], [2, 99]], 1, "token id 99 is outside the vocabulary, 0 .. 10"),
        ([[], [1]], 0, "the prompt is empty"),
        ([[1], [2], []], 2, "the prompt is empty"),
        ([[1], [3] * 30], 1, "the prompt has 30 tokens and the model's context is 20"),
        ([[1], "text"], 1, "a text prompt needs a tokenizer"),
        ([[1], 3], 1, "a prompt is text, token ids or chat messages, not int"),
        ([[1], None], 1, "a prompt is text, token ids or chat messages, not NoneType"),
        ([[1], [2.5]], 1, "a prompt is text, token ids or chat messages; it holds 2.5"),
        ([[1], Request([2], stop="x")], 1, "stop strings need a tokenizer"),
        ([[1], Request([2], max_new_tokens=-1)], 1, "max_new_tokens must be 0 or more, not -1"),
        ([[1], Request([2], logprobs=-1)], 1, "logprobs must be 0 or more, not -1"),
        ([[1], Request([2], stop_token_ids=[11])], 1, "stop_token_ids must be token ids"),
        ([[1], Request([2], logits_processor=[3])], 1, "logits_processor must be callable"),
        ([[1], Request([2], constraint=3)], 1, "a constraint is "),
    ],
)
def test_a_mistake_names_its_prompt_before_anything_is_run(
    prompts: Any, number: int, message: str
) -> None:
    model = ToyAdapter(max_positions=20)
    decoder = toy(model, tokenizer=None)
    with pytest.raises((ConfigError, GenerationError)) as caught:
        decoder.generate(prompts)
    assert str(caught.value).startswith(f"prompt {number} of the batch: {message}")
    assert "\n" not in str(caught.value)
    assert model.forwards == []
    results = decoder.generate([[1], [2]], max_new_tokens=5)
    assert [len(result.tokens) for result in results] == [5, 5]


def test_a_mistake_in_a_batch_still_says_which_setting_it_is() -> None:
    with pytest.raises(ConfigError) as caught:
        toy(ToyAdapter()).generate([[1], Request([2], max_new_tokens=-1)])
    assert (caught.value.key, caught.value.value) == ("max_new_tokens", -1)


def test_an_unknown_option_of_a_batch() -> None:
    with pytest.raises(ConfigError, match="unknown option 'temprature': did you mean 'temperatur"):
        toy(ToyAdapter()).generate(PROMPTS, temprature=1.0)


def test_a_batch_has_no_streamer() -> None:
    class Streamer:
        def put(self, tokens: Any) -> None: ...
        def end(self) -> None: ...

    with pytest.raises(ConfigError, match="a streamer shows one prompt, not a batch") as caught:
        toy(ToyAdapter()).generate(PROMPTS, streamer=Streamer())
    assert caught.value.key == "streamer"


class DeadEnd(Parity):
    """Runs out of tokens after the third."""

    def __init__(self, left: int = 3) -> None:
        self.left = left

    def fork(self) -> DeadEnd:
        return DeadEnd(self.left)

    def advance(self, token: int) -> bool:
        self.left -= 1
        return True

    def mask(self) -> Tensor:
        return torch.full((V,), self.left > 0)


def test_a_sequence_that_fails_on_the_way_is_named() -> None:
    decoder = toy(ToyAdapter(), "autoregressive")
    asked = [Request([1]), Request([2], max_new_tokens=1), Request([3], constraint=DeadEnd())]
    with pytest.raises(GenerationError, match="leave no token to choose from") as caught:
        decoder.generate(asked, max_new_tokens=9)
    assert caught.value.step == 3
    with pytest.raises(GenerationError, match=r"^prompt 2 of the batch: ") as caught:
        decoder.generate(asked)
    # What there was is not lost, nor what the others accepted in the step that failed.
    assert caught.value.sequence == 2
    results = caught.value.results
    assert results is not None
    alone = [decoder.generate([1], max_new_tokens=4), decoder.generate([2], max_new_tokens=1)]
    assert [result.tokens for result in results[:2]] == [result.tokens for result in alone]
    assert [result.finish_reason for result in results] == ["cancelled", "length", "cancelled"]
    assert len(results[2].tokens) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_processor_raises_in_a_batch_does_not_lose_the_other_answers(
    error: type[BaseException],
) -> None:
    """The exception is the caller's own, as for a single prompt."""

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == 4:
            raise error("mine")
        return scores

    decoder = toy(ToyAdapter(), "autoregressive")
    asked = [Request([1]), Request([3], logits_processor=processor)]
    with pytest.raises(error, match=r"^mine") as caught:
        decoder.generate(asked, max_new_tokens=9)
    results = cast("Any", caught.value).results
    assert len(results[0].tokens) == (4 if error is ValueError else 3)
    assert results[0].tokens == decoder.generate([1], max_new_tokens=len(results[0].tokens)).tokens
    assert len(results[1].tokens) == 3
    if error is ValueError:
        assert cast("Any", caught.value).sequence == 1
        assert getattr(caught.value, "__notes__", ["prompt 1 of the batch: step 3"]) == [
            "prompt 1 of the batch: step 3"
        ]


def test_a_decoder_goes_on_after_a_sequence_of_a_batch_failed() -> None:
    model = ToyAdapter()
    decoder = toy(model, "jacobi")
    for _ in range(3):
        with pytest.raises(GenerationError):
            decoder.generate([Request([1]), Request([3], constraint=DeadEnd())], max_new_tokens=9)
        for prompt, result in zip(
            PROMPTS, decoder.generate(PROMPTS, max_new_tokens=9), strict=True
        ):
            assert result.tokens == plain_decode(model, prompt, max_new_tokens=9)


# --- what a cache keeps --------------------------------------------------------------------------

SUBSETS = [(0,), (3,), (1, 3), (0, 2), (2, 3), (0, 1, 3), (0, 1, 2, 3)]
BUSH = TokenTree((5, 9, 7, 7), (ROOT, 0, 0, ROOT))


@pytest.mark.parametrize("kept", SUBSETS, ids=str)
def test_a_toy_cache_keeps_the_rows_of_the_sequences_that_are_left(kept: tuple[int, ...]) -> None:
    model = ToyAdapter()
    caches = model.new_cache(batch=4, capacity=20)
    model.forward([StepPlan(0, tuple(prompt)) for prompt in PROMPTS[:4]], caches)
    caches.commit([range(len(prompt)) for prompt in PROMPTS[:4]])
    before = copy.deepcopy(caches.rows)
    caches.keep(kept)
    assert caches.rows == [before[sequence] for sequence in kept]
    plans = [StepPlan(len(PROMPTS[s]), (4,), BUSH) for s in kept]
    for sequence, logits in zip(kept, model.forward(plans, caches), strict=True):
        for node in range(ROOT, len(BUSH)):
            path = (*PROMPTS[sequence], 4, *BUSH.path_tokens(node))
            assert torch.equal(logits[node + 1], model.logits_after(path))


def test_a_toy_cache_wants_its_sequences_in_order() -> None:
    with pytest.raises(AssertionError, match="named in order"):
        ToyCache(batch=3, capacity=4).keep([1, 0])


def memory_of(caches: HFCache | LlamaCache, layer: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values [B, K, C, D] of a layer."""
    if isinstance(caches, LlamaCache):
        return caches.rows(layer)
    return caches.layers[layer].keys, caches.layers[layer].values


def rows_of(caches: HFCache | LlamaCache, sequence: int) -> list[Tensor]:
    """Return the committed keys and values [K, P, D] of all layers."""
    length = caches.lengths[sequence]
    return [
        states[sequence, :, :length].clone()
        for layer in range(2)
        for states in memory_of(caches, layer)
    ]


@pytest.mark.parametrize("kept", SUBSETS, ids=str)
@pytest.mark.parametrize(("kind", "name"), ADAPTERS)
def test_the_keys_and_values_that_are_kept_are_those_before(
    kind: str, name: str, kept: tuple[int, ...]
) -> None:
    model = tiny_model(kind)
    adapter = build_adapter(model, adapter=name, backend="eager")
    prompts = [random_prompt(length, seed=length) for length in (3, 2 * WINDOW, 1, 17)]
    caches = adapter.new_cache(batch=4, capacity=48)
    adapter.forward([StepPlan(0, tuple(prompt), BUSH) for prompt in prompts], caches)
    caches.commit([[*range(len(prompt)), len(prompt) + 3] for prompt in prompts])  # a gap in each
    texts = [[*prompt, BUSH.tokens[3]] for prompt in prompts]
    before = [rows_of(caches, sequence) for sequence in range(4)]
    caches.keep(kept)
    assert caches.lengths == tuple(len(texts[sequence]) for sequence in kept)
    for new, old in enumerate(kept):
        for now, then in zip(rows_of(caches, new), before[old], strict=True):
            assert torch.equal(now, then)
    # A pass over those that are left is what it would be in a cache of their own.
    plans = [StepPlan(len(texts[s]), (4, 6), BUSH) for s in kept]
    for sequence, logits in zip(kept, adapter.forward(plans, caches), strict=True):
        for node in range(ROOT, len(BUSH)):
            path = [*texts[sequence], 4, 6, *BUSH.path_tokens(node)]
            expected = logits_after(model, path)
            torch.testing.assert_close(logits[node + 1], expected, atol=2e-4, rtol=1e-4)
    # And what comes next is written to the right places.
    caches.commit([[0, 1, 2]] * len(kept))
    if len(kept) > 1:
        last = rows_of(caches, len(kept) - 1)
        caches.keep([len(kept) - 1])
        for now, then in zip(rows_of(caches, 0), last, strict=True):
            assert torch.equal(now, then)


@pytest.mark.parametrize("name", ["hf", "llama"])
@settings(max_examples=80)
@given(data=st.data(), batch=st.integers(1, 5))
def test_a_cache_is_a_list_of_rows_for_each_sequence(
    name: str, data: st.DataObject, batch: int
) -> None:
    """Any order of passes, commits, departures and new starts, against plain lists."""
    layers, heads, width, capacity = 2, 2, 3, 20
    shape = {"layers": layers, "batch": batch, "capacity": capacity}
    caches: Any = HFCache(**shape)
    if name == "llama":
        caches = LlamaCache(
            **shape, heads=heads, dim=width, dtype=torch.float32, device=torch.device("cpu")
        )
    used = False
    truth: list[list[float]] = [[] for _ in range(batch)]
    fresh = 1.0

    def states(rows: list[list[float]], longest: int, shift: float) -> Tensor:
        """Return [B, K, R, D]; rows that only pad are -1."""
        padded = torch.tensor([row + [-1.0] * (longest - len(row)) for row in rows]) + shift
        return padded[:, None, :, None].expand(-1, heads, -1, width).contiguous()

    def check(seen: Tensor, sequence: int, rows: list[float], shift: float) -> None:
        expected = (torch.tensor(rows) + shift)[None, :, None].expand(heads, -1, width)
        assert torch.equal(seen[sequence, :, : len(rows)], expected)

    for _ in range(data.draw(st.integers(1, 8))):
        step = data.draw(st.sampled_from(["pass", "pass", "pass", "keep", "reset"]))
        if step == "reset":
            caches.reset()
            truth = [[] for _ in range(batch)]  # those that left are there again
        elif step == "keep":
            chosen = data.draw(st.sets(st.integers(0, len(truth) - 1), min_size=1))
            caches.keep(sorted(chosen))
            truth = [truth[sequence] for sequence in sorted(chosen)]
        else:
            rooms = [min(capacity - len(rows), 5) for rows in truth]
            if min(rooms) < 1:
                continue
            new = []
            for room in rooms:
                count = data.draw(st.integers(1, room))
                new.append([fresh + i for i in range(count)])
                fresh += count
            caches.begin([len(rows) for rows in new])
            used = True
            longest = max(map(len, new))
            for layer in range(layers):
                made = (
                    states(new, longest, 1000.0 * layer),
                    states(new, longest, 1000.0 * layer + 500),
                )
                if name == "llama":
                    keys, values = caches.write(layer, *made)
                else:
                    keys, values = caches.update(*made, layer)
                for sequence, (old, rows) in enumerate(zip(truth, new, strict=True)):
                    check(keys, sequence, old + rows, 1000.0 * layer)
                    check(values, sequence, old + rows, 1000.0 * layer + 500)
            kept = [
                sorted(data.draw(st.sets(st.integers(0, len(rows) - 1)), label="kept"))
                for rows in new
            ]
            caches.commit(kept)
            for old, rows, some in zip(truth, new, kept, strict=True):
                old.extend(rows[row] for row in some)
        assert caches.lengths == tuple(map(len, truth))
        for layer in range(layers if used else 0):
            keys, values = memory_of(caches, layer)
            for sequence, rows in enumerate(truth):
                check(keys, sequence, rows, 1000.0 * layer)
                check(values, sequence, rows, 1000.0 * layer + 500)
