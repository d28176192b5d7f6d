"""The traps that public decoders fell into, one test per trap and feature that can meet it.

Each docstring names a project where the bug was seen. The model is a toy whose every wrong row
shows; proposers that are always right make every accepted run as long as it can be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decodekit import Decoder
from decodekit.decoder.build import build_strategy
from decodekit.errors import ConfigError, GenerationError
from decodekit.interfaces.tree import TokenTree
from decodekit.strategies.lookahead.pool import RecentNGramPool
from decodekit.strategies.lookahead.proposer import LookaheadConfig
from tests.support.fakes import (
    ByteTokenizer,
    Given,
    OracleProposer,
    ToyAdapter,
    plain_decode,
    words,
)

PROMPT = [3, 1, 4, 1, 5]
ALL = ["autoregressive", "jacobi", "prompt_lookup", "lookahead"]


def oracle(model: ToyAdapter, *, depth: int = 4, wrong_at: int | None = None) -> Given:
    """Return a strategy that proposes the true continuation, wrong from ``wrong_at`` on."""
    endless = ToyAdapter(model.vocab_size, model.seed, context=model.context)
    text = PROMPT + plain_decode(endless, PROMPT, max_new_tokens=100)
    return Given(
        lambda: OracleProposer(text, depth=depth, wrong_at=wrong_at, vocab_size=model.vocab_size)
    )


def decoder(model: ToyAdapter, strategy: Any = None, tokenizer: Any = None) -> Decoder:
    if strategy is None:
        strategy = oracle(model)
    elif isinstance(strategy, str):
        strategy = build_strategy(strategy)
    return Decoder(model, tokenizer, strategy=strategy)


@pytest.mark.parametrize("place", range(12))
def test_trap_01_eos_inside_an_accepted_run(place: int) -> None:
    """transformers#47912: output, cache, stream and counters end at EOS."""
    endless = ToyAdapter()
    text = plain_decode(endless, PROMPT, max_new_tokens=40)
    eos = text[place]
    model = ToyAdapter(eos=[eos])
    end = text.index(eos) + 1
    stream = decoder(model, tokenizer=words(11)).stream(PROMPT, max_new_tokens=40)
    chunks = list(stream)
    result = stream.result
    assert result.tokens == text[:end]
    assert [token for chunk in chunks for token in chunk.tokens] == text[:end]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["eos"]
    assert result.finish_reason == "eos"
    assert result.stats.tokens == end
    assert len(PROMPT) + end - 1 <= model.caches[-1].lengths[0] <= len(PROMPT) + end


@pytest.mark.parametrize("strategy", [None, *ALL])
def test_trap_02_any_of_several_eos_ids_ends_the_text(strategy: str | None) -> None:
    """LookaheadDecoding PR#69: only the first id was checked."""
    text = plain_decode(ToyAdapter(), PROMPT, max_new_tokens=40)
    for other in sorted(set(text)):
        model = ToyAdapter(eos=[99, other])
        tokens = decoder(model, strategy).generate(PROMPT, max_new_tokens=40).tokens
        assert tokens == text[: text.index(other) + 1]


@pytest.mark.parametrize("strategy", [None, *ALL])
@pytest.mark.parametrize("budget", range(11))
def test_trap_03_exactly_max_new_tokens(strategy: str | None, budget: int) -> None:
    """transformers#47195, vllm#42533: the budget is reached inside a run."""
    model = ToyAdapter()
    result = decoder(model, strategy).generate(PROMPT, max_new_tokens=budget)
    assert result.tokens == plain_decode(model, PROMPT, max_new_tokens=budget)
    assert len(result.tokens) == budget
    assert result.finish_reason == "length"
    assert result.stats.steps <= budget


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("length", [1, 3, 4, 7])
@pytest.mark.parametrize("strategy", [None, *ALL])
def test_trap_04_a_stop_string_inside_or_across_runs_and_tokens(
    strategy: str | None, start: int, length: int
) -> None:
    """transformers#48039, vllm#3574: text is cut before it, and streamed text is the final text."""
    model = ToyAdapter()
    tokens = plain_decode(model, PROMPT, max_new_tokens=20)
    whole = words(11).decode(tokens)
    stop = whole[start : start + length]
    stream = decoder(model, strategy, words(11)).stream(PROMPT, max_new_tokens=20, stop=stop)
    shown = "".join(chunk.text for chunk in stream)
    assert shown == stream.result.text == whole[: whole.index(stop)]
    assert stream.result.finish_reason == "stop"
    ends = [len(words(11).decode(tokens[: i + 1])) for i in range(len(tokens))]
    needed = next(i for i, end in enumerate(ends) if end >= whole.index(stop) + len(stop))
    assert stream.result.tokens == tokens[: needed + 1]


@pytest.mark.parametrize("strategy", [None, *ALL])
def test_trap_05_every_token_is_streamed_once_and_in_order(strategy: str | None) -> None:
    """vllm PR#26027, LookaheadDecoding PR#69."""
    model = ToyAdapter(context=2)
    stream = decoder(model, strategy, words(11)).stream(PROMPT, max_new_tokens=30)
    chunks = list(stream)
    expected = plain_decode(model, PROMPT, max_new_tokens=30)
    assert [token for chunk in chunks for token in chunk.tokens] == expected
    assert "".join(chunk.text for chunk in chunks) == words(11).decode(expected)
    assert all(chunk.tokens for chunk in chunks)


@pytest.mark.parametrize("strategy", [None, *ALL])
def test_trap_06_no_broken_character_is_streamed(strategy: str | None) -> None:
    """dynamo#12630, exo#1691: the bytes of a character wait for each other."""
    pieces = ["é", "漢", "🙂", "a"]
    halves = [half for text in pieces for half in (text.encode()[:1], text.encode()[1:])]
    tokenizer = ByteTokenizer([*halves, b"x", b"y", b"z"])
    model = ToyAdapter(context=2)
    stream = decoder(model, strategy, tokenizer).stream(PROMPT, max_new_tokens=40)
    shown = [chunk.text for chunk in stream]
    whole = tokenizer.decode(stream.result.tokens)
    assert "".join(shown) == stream.result.text == whole
    # What is broken in the model's own output is shown, but nothing that a later byte completes.
    assert "".join(shown).count("\ufffd") == whole.count("\ufffd")


def test_trap_07_ties_go_to_the_lowest_id_in_every_strategy() -> None:
    """transformers#39421: the winner of a tie must not depend on the number of rows."""

    class Tied(ToyAdapter):
        def logits_after(self, path: Sequence[int]) -> torch.Tensor:
            return super().logits_after(path).round()  # seven values for eleven tokens

    model = Tied(context=2)
    expected = plain_decode(model, PROMPT, max_new_tokens=30)
    for strategy in ALL:
        assert decoder(model, strategy).generate(PROMPT, max_new_tokens=30).tokens == expected


def test_trap_10_a_draw_of_zero_never_emits_an_impossible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers#32867: `<=` where `<` belongs accepts a token of probability 0.

    Here every token outside the two best has all the luck that there can be.
    """
    model = ToyAdapter()
    lucky = torch.full((model.vocab_size,), 2.0**-53, dtype=torch.float64)
    monkeypatch.setattr("decodekit.engine.noise.exponentials", lambda *_, **__: lucky)
    options = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 2}
    tokens = decoder(model, "lookahead").generate(PROMPT, **options).tokens
    for place, token in enumerate(tokens):
        best = model.logits_after([*PROMPT, *tokens[:place]]).topk(2).indices.tolist()
        assert token == best[0]


def test_trap_11_duplicate_candidates_change_nothing() -> None:
    """LookaheadDecoding's sampling: equal candidates made the residual 0/0."""
    model = ToyAdapter()
    text = PROMPT + plain_decode(model, PROMPT, max_new_tokens=60)

    class Twice(OracleProposer):
        def propose(self, committed: Any, budget: Any) -> Any:
            proposal = super().propose(committed, budget)
            tree, _ = TokenTree.merge([proposal.tree, proposal.tree], dedupe=False)
            return replace(proposal, tree=tree.limited(nodes=budget.nodes, depth=budget.depth))

    strategy = Given(lambda: Twice(text, depth=4))
    result = decoder(model, strategy).generate(PROMPT, max_new_tokens=20)
    assert result.tokens == text[5:25]
    assert result.stats.steps == 4
    sampled = decoder(model, "lookahead").generate(PROMPT, max_new_tokens=20, temperature=1.0)
    plain = decoder(model, "autoregressive").generate(PROMPT, max_new_tokens=20, temperature=1.0)
    assert sampled.tokens == plain.tokens


@pytest.mark.parametrize("depth", [1, 3, 4, 7])
def test_trap_12_a_full_match_yields_every_accepted_token_and_the_bonus(depth: int) -> None:
    """LookaheadDecoding#32: one accepted token was lost."""
    model = ToyAdapter()
    stream = decoder(model, oracle(model, depth=depth)).stream(PROMPT, max_new_tokens=60)
    runs = [len(chunk.tokens) for chunk in stream]
    assert set(runs[:-1]) == {depth + 1}


@pytest.mark.parametrize("wrong_at", range(4))
def test_trap_12_a_wrong_token_ends_the_run_where_it_stands(wrong_at: int) -> None:
    """The adversarial proposer: what comes before the wrong token is kept, and the right one."""
    model = ToyAdapter()
    stream = decoder(model, oracle(model, wrong_at=wrong_at)).stream(PROMPT, max_new_tokens=40)
    runs = [len(chunk.tokens) for chunk in stream]
    assert stream.result.tokens == plain_decode(model, PROMPT, max_new_tokens=40)
    assert set(runs[:-1]) == {wrong_at + 1}


# 13: tests/unit/adapters/test_hf_adapter.py, keys and values after acceptance
# 14: tests/unit/adapters, behaviour/test_lossless.py, sliding windows shorter than the prompt
# 15: tests/unit/adapters/test_hf_adapter.py, unsupported models
# 20: tests/unit/backends/test_backends.py and tests/unit/adapters, poison tests


@pytest.mark.parametrize("strategy", [None, *ALL])
@pytest.mark.parametrize("length", range(5, 26))
def test_trap_16_the_tree_shrinks_at_the_last_positions(strategy: str | None, length: int) -> None:
    """llama.cpp#15445: scratch rows overflow the context; the last tokens must still be right."""
    model = ToyAdapter(max_positions=26)
    prompt = (PROMPT * 6)[:length]
    strategies = strategy or "lookahead"
    result = decoder(model, strategies).generate(prompt, max_new_tokens=100)
    assert result.tokens == plain_decode(model, prompt, max_new_tokens=100)
    assert len(prompt) + len(result.tokens) == 26
    assert result.finish_reason == "capacity"
    exact = decoder(model, strategies).generate(prompt, max_new_tokens=26 - length)
    assert exact.tokens == result.tokens
    assert exact.finish_reason == "length"


def test_trap_16_a_prompt_as_long_as_the_context_is_refused() -> None:
    model = ToyAdapter(max_positions=5)
    with pytest.raises(GenerationError, match="5 tokens and the model's context is 5; shorten"):
        decoder(model, "lookahead").generate(PROMPT)


@pytest.mark.parametrize("window_size", [1, 2, 3])
@pytest.mark.parametrize("ngram_size", [2, 3, 5])
@pytest.mark.parametrize("max_candidates", [0, 1, 3])
def test_trap_17_degenerate_sizes(window_size: int, ngram_size: int, max_candidates: int) -> None:
    """LookaheadDecoding#40, #41: short prompts and the smallest windows."""
    config = LookaheadConfig(
        window_size=window_size, ngram_size=ngram_size, max_candidates=max_candidates
    )
    for prompt in ([7], [7, 7], PROMPT):
        for realign in (False, True):
            model = ToyAdapter(context=2)
            strategy = build_strategy(replace(config, realign=realign))
            result = decoder(model, strategy).generate(prompt, max_new_tokens=25)
            assert result.tokens == plain_decode(model, prompt, max_new_tokens=25)


@pytest.mark.parametrize("prompt", [[], "", "  "])
def test_trap_17_an_empty_prompt_is_a_clear_error(prompt: Any) -> None:
    class Silent(ByteTokenizer):
        def __call__(self, *_: Any, **__: Any) -> Any:
            return {"input_ids": []}

    with pytest.raises(GenerationError, match=r"the (prompt|list) is empty"):
        decoder(ToyAdapter(), "lookahead", Silent([b"a"])).generate(prompt, chat=False)


def test_trap_18_the_pool_is_bounded() -> None:
    """ArcticInference#165: memory of a long-lived process."""
    pool = RecentNGramPool(per_key=3, max_keys=10)
    generator = random.Random(0)
    for _ in range(5000):
        pool.insert(generator.randrange(100), [generator.randrange(100) for _ in range(4)])
    assert len(pool) <= 30


@pytest.mark.parametrize("strategy", ALL)
def test_trap_21_no_global_random_state_is_touched(strategy: str) -> None:
    """LookaheadDecoding: Python's and torch's generators were consumed."""
    states = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1])
    options = {"max_new_tokens": 15, "temperature": 1.0, "seed": 4}
    first = decoder(ToyAdapter(), strategy).generate(PROMPT, **options).tokens
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])
    random.seed(1), torch.manual_seed(1)
    assert decoder(ToyAdapter(), strategy).generate(PROMPT, **options).tokens == first


def steps(**settings: Any) -> tuple[int, float]:
    model = ToyAdapter(vocab_size=7, context=1)
    strategy = build_strategy({"name": "lookahead", **settings})
    stats = decoder(model, strategy).generate(PROMPT * 3, max_new_tokens=40).stats
    return stats.steps, stats.rows_per_step


@pytest.mark.parametrize(
    "settings",
    [
        {"window_size": 5},
        {"ngram_size": 3},
        {"max_candidates": 0},
        {"prompt_ngrams": False},
        {"accepted_ngrams": False},
        {"realign": True},
        {"max_keys": 1},
    ],
)
def test_trap_22_every_option_of_lookahead_does_something(settings: dict[str, Any]) -> None:
    """mlx-lm#1297: an option was parsed and did nothing."""
    assert steps(**settings) != steps()


def test_trap_22_an_unknown_pool_is_refused_when_the_decoder_is_built() -> None:
    with pytest.raises(ConfigError, match="unknown pool 'recnt': did you mean 'recent'"):
        build_strategy({"name": "lookahead", "pool": "recnt"})


# 23: tests/unit/adapters/test_hf_adapter.py and tests/unit/engine/test_runner.py, ragged batches


@pytest.mark.parametrize("strategy", ALL)
def test_trap_24_nothing_leaks_from_one_request_to_the_next(strategy: str) -> None:
    """TensorRT-LLM#2263: A, B, A gives A = A, with the same number of steps."""
    model = ToyAdapter(context=2)
    one = decoder(model, strategy)
    first = one.generate(PROMPT, max_new_tokens=25)
    one.generate([9, 8, 7] * 9, max_new_tokens=40, temperature=1.5, seed=3)
    again = one.generate(PROMPT, max_new_tokens=25)
    assert again.tokens == first.tokens
    assert again.stats.steps == first.stats.steps


@pytest.mark.parametrize("strategy", ALL)
def test_trap_24_interleaved_streams_do_not_meet(strategy: str) -> None:
    model = ToyAdapter(context=2)
    one = decoder(model, strategy)
    streams = [one.stream(prompt, max_new_tokens=20) for prompt in (PROMPT, [2, 2], PROMPT[::-1])]
    open_streams = list(streams)
    while open_streams:
        open_streams = [stream for stream in open_streams if next(stream, None) is not None]
    for stream, prompt in zip(streams, (PROMPT, [2, 2], PROMPT[::-1]), strict=True):
        assert stream.result.tokens == plain_decode(model, prompt, max_new_tokens=20)


def test_an_abandoned_stream_frees_its_cache_and_keeps_its_result() -> None:
    model = ToyAdapter()
    one = decoder(model, "jacobi")
    stream = one.stream(PROMPT, max_new_tokens=30)
    next(stream)
    next(stream)
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert (
        stream.result.tokens
        == plain_decode(model, PROMPT, max_new_tokens=30)[: stream.result.stats.tokens]
    )
    caches = len(model.caches)
    one.generate(PROMPT, max_new_tokens=5)
    assert len(model.caches) == caches


# --- processors, scores, batches -----------------------------------------------------------------


def processed(
    model: ToyAdapter, count: int, process: Callable[[list[int], torch.Tensor], torch.Tensor]
) -> list[int]:
    """Decode token by token; ``process`` changes the logits after the text so far."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(process(tokens, model.logits_after(tokens)).argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 3])
def test_trap_08_penalties_see_the_accepted_prefix_of_their_own_row(wrong_at: int | None) -> None:
    """Seen in sglang#33643 and vllm#18902: penalties knew the committed tokens only."""
    model = ToyAdapter(context=2)

    def penalize(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        for token in set(tokens):
            logits[token] *= 1 / 1.4 if logits[token] > 0 else 1.4
        for token in tokens[len(PROMPT) :]:
            logits[token] -= 0.3
        return logits

    expected = processed(model, 24, penalize)
    assert expected != plain_decode(model, PROMPT, max_new_tokens=24)
    text = [*PROMPT, *expected, *([0] * 8)]
    strategy = Given(
        lambda: OracleProposer(text, depth=4, wrong_at=wrong_at, vocab_size=model.vocab_size)
    )
    for one in (strategy, *ALL):
        result = decoder(model, one).generate(
            PROMPT, max_new_tokens=24, repetition_penalty=1.4, frequency_penalty=0.3
        )
        assert result.tokens == expected


@pytest.mark.parametrize("least", range(8))
@pytest.mark.parametrize("strategy", [None, *ALL])
def test_trap_09_min_new_tokens_inside_a_run(strategy: str | None, least: int) -> None:
    """Seen in vllm PR#41768: the first tokens of a run were counted one too few."""
    # Half of the tokens end a text, so that one of them is likely at every place.
    model = ToyAdapter(eos=range(0, 11, 2))

    def hold(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        banned = range(0, 11, 2) if len(tokens) - len(PROMPT) < least else ()
        return logits.index_fill(0, torch.tensor(list(banned), dtype=torch.int64), -torch.inf)

    tokens = processed(model, 20, hold)
    end = next(place for place, token in enumerate(tokens) if token % 2 == 0)
    text = [*PROMPT, *tokens]
    given = Given(lambda: OracleProposer(text, depth=4)) if strategy is None else strategy
    result = decoder(model, given).generate(PROMPT, max_new_tokens=20, min_new_tokens=least)
    assert result.tokens == tokens[: end + 1]
    assert len(result.tokens) > least
    assert result.finish_reason == "eos"


@pytest.mark.parametrize("strategy", [None, *ALL])
@pytest.mark.parametrize("stop", [None, 3, 8])
def test_trap_19_one_log_probability_for_each_new_token(
    strategy: str | None, stop: int | None
) -> None:
    """Seen in vllm#17876 and llama.cpp#27972: they were misaligned, or more than the tokens."""
    model = ToyAdapter()
    tokens = plain_decode(model, PROMPT, max_new_tokens=20)
    if stop is not None:
        model.eos_token_ids = frozenset([tokens[stop]])
        tokens = plain_decode(model, PROMPT, max_new_tokens=20)
    given = oracle(ToyAdapter()) if strategy is None else strategy
    result = decoder(model, given).generate(PROMPT, max_new_tokens=20, logprobs=2)
    assert result.tokens == tokens
    assert result.logprobs is not None
    assert [one.token for one in result.logprobs] == tokens
    for place, one in enumerate(result.logprobs):
        exact = model.logits_after([*PROMPT, *tokens[:place]]).log_softmax(dim=-1)
        assert one.logprob == pytest.approx(float(exact[one.token]), abs=1e-5)
        assert [token for token, _ in one.top] == exact.topk(2).indices.tolist()


@pytest.mark.parametrize("strategy", ALL)
def test_trap_23_a_ragged_batch_is_three_single_runs(strategy: str) -> None:
    """Seen in transformers PR#42655: padding on the left gave rows that saw nothing, and NaN."""
    model = ToyAdapter(context=3)
    prompts = [PROMPT, [7], [2, 9] * 11]
    results = decoder(model, strategy).generate(prompts, max_new_tokens=25)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == plain_decode(model, prompt, max_new_tokens=25)
