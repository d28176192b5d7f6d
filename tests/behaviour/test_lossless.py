"""The promise: every strategy gives the tokens of a plain loop, greedy and sampled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodekit import Decoder
from decodekit.decoder.runs import first_difference
from decodekit.engine.sampling import PositionSampler
from decodekit.interfaces.sampling_params import SamplingParams
from tests.support.attention import NEEDS_TRITON
from tests.support.tiny import (
    VOCABULARY,
    WINDOW,
    greedy_loop,
    logits_after,
    random_prompt,
    tiny_model,
)

STRATEGIES: list[Any] = [
    "autoregressive",
    "jacobi",
    "prompt_lookup",
    "lookahead",
    {"name": "lookahead", "window_size": 15, "ngram_size": 5, "max_candidates": 15},
    {"name": "lookahead", "window_size": 3, "ngram_size": 4, "max_candidates": 3},
    {"name": "lookahead", "realign": True},
]
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def sampled_loop(model: Any, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
    """Sample token by token, each from a full forward pass of the model's own."""
    tokens: list[int] = []
    for _ in range(count):
        logits = logits_after(model, [*prompt, *tokens])
        position = len(prompt) + len(tokens)
        tokens += PositionSampler(params).choose(logits[None], [position])
    return tokens


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("llama", "hf"),
        ("llama", "llama"),
        ("mistral", "hf"),
        ("mistral", "llama"),
        ("qwen2", "hf"),
        ("qwen2", "llama"),
        ("gpt2", "hf"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "eager", "flash", "invariant", "sdpa"])
def test_greedy_equals_a_plain_loop_and_generate(kind: str, adapter: str, backend: str) -> None:
    model = tiny_model(kind)
    prompt = random_prompt(21)
    expected = greedy_loop(model, prompt, 48)
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)
    assert generated[0, len(prompt) :].tolist() == expected
    for strategy in STRATEGIES:
        decoder = Decoder.from_model(model, strategy=strategy, adapter=adapter, backend=backend)
        result = decoder.generate(prompt, max_new_tokens=48)
        assert result.tokens == expected, strategy


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param("mistral", {"name": "flex", "compile": False}, id="mistral-flex"),
        pytest.param("gemma2", {"name": "flex", "compile": False}, id="gemma2-flex"),
        pytest.param("mistral", "triton", marks=NEEDS_TRITON),
        pytest.param("gemma2", "triton", marks=NEEDS_TRITON),
    ],
)
def test_greedy_on_kernels_that_are_slow_here(kind: str, backend: Any) -> None:
    """Fewer tokens than above; prompt and text cross the window, gemma2 has a softcap as well."""
    model = tiny_model(kind)
    prompt = random_prompt(WINDOW - 2)
    expected = greedy_loop(model, prompt, 6)
    for strategy in ("lookahead", "prompt_lookup"):
        result = Decoder.from_model(model, strategy=strategy, backend=backend).generate(
            prompt, max_new_tokens=6
        )
        assert result.tokens == expected, strategy


@pytest.mark.parametrize("adapter", ["hf", "llama"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sampled_equals_a_plain_loop(kind: str, adapter: str, seed: int) -> None:
    model = tiny_model(kind)
    prompt = random_prompt(9, seed=seed)
    expected = sampled_loop(model, prompt, 40, SamplingParams(**SAMPLED, seed=seed))
    assert expected != greedy_loop(model, prompt, 40)
    for strategy in STRATEGIES:
        decoder = Decoder.from_model(model, strategy=strategy, adapter=adapter)
        result = decoder.generate(prompt, max_new_tokens=40, seed=seed, **SAMPLED)
        assert result.tokens == expected, strategy


def test_a_strategy_saves_steps_where_the_text_repeats() -> None:
    """Guards the tests above against strategies that propose nothing."""
    model = copy.deepcopy(tiny_model())
    with torch.no_grad():  # a head that says its input again
        model.model.embed_tokens.weight *= 20
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    for strategy in STRATEGIES[1:]:
        decoder = Decoder.from_model(model, strategy=strategy, backend="eager")
        stats = decoder.generate(random_prompt(8), max_new_tokens=48).stats
        assert stats.tokens_per_step > 2, strategy


@settings(max_examples=25)
@given(
    prompt=st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=40),
    count=st.integers(0, 30),
    window_size=st.integers(1, 6),
    ngram_size=st.integers(2, 5),
    max_candidates=st.integers(0, 5),
    realign=st.booleans(),
    prefill_chunk=st.integers(1, 50),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 1, 7]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_lookahead_equals_autoregressive(
    prompt: list[int],
    count: int,
    window_size: int,
    ngram_size: int,
    max_candidates: int,
    realign: bool,
    prefill_chunk: int,
    temperature: float,
    top_k: int,
    min_p: float,
    seed: int,
) -> None:
    model = tiny_model()
    strategy = {
        "name": "lookahead",
        "window_size": window_size,
        "ngram_size": ngram_size,
        "max_candidates": max_candidates,
        "realign": realign,
    }
    options: dict[str, Any] = {
        "max_new_tokens": count,
        "temperature": temperature,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    expected = Decoder.from_model(model, strategy="autoregressive").generate(prompt, **options)
    result = Decoder.from_model(model, strategy=strategy, prefill_chunk=prefill_chunk).generate(
        prompt, **options
    )
    assert result.tokens == expected.tokens
    assert len(result.tokens) == count


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Float64 is exact; in bfloat16 a strategy may differ only where the best two are a tie."""
    model = tiny_model(dtype=dtype)
    prompt = random_prompt(12)
    expected = greedy_loop(model, prompt, 40)
    for strategy in STRATEGIES:
        tokens = (
            Decoder.from_model(model, strategy=strategy).generate(prompt, max_new_tokens=40).tokens
        )
        place = first_difference(tokens, expected)
        if place is None:
            continue
        assert dtype is torch.bfloat16
        best = logits_after(model, [*prompt, *expected[:place]]).float().topk(2).values
        # The mean error of the model's own logits here, against float64, is 0.22, the largest 0.65.
        assert best[0] - best[1] <= 0.22


@pytest.mark.parametrize("adapter", ["hf", "llama"])
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_trap_14_a_sliding_window_is_judged_by_position(
    kind: str, adapter: str, length: int
) -> None:
    """Seen in transformers#48280: rows of a tree lie elsewhere in the cache than in the text."""
    model = tiny_model(kind)
    prompt = random_prompt(length, seed=4)
    expected = greedy_loop(model, prompt, 2 * WINDOW)
    for strategy in STRATEGIES:
        decoder = Decoder.from_model(model, strategy=strategy, adapter=adapter)
        result = decoder.generate(prompt, max_new_tokens=2 * WINDOW)
        assert result.tokens == expected, strategy
