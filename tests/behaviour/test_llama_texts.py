"""The lean adapter writes what the ``hf`` adapter writes: every strategy, greedy and sampled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from decodekit import Decoder
from tests.support.tiny import LLAMA_FAMILY, WINDOW, random_prompt, tiny_model

STRATEGIES: list[Any] = [
    "autoregressive",
    "jacobi",
    "prompt_lookup",
    "lookahead",
    {"name": "lookahead", "window_size": 7, "ngram_size": 5, "max_candidates": 7},
    {"name": "lookahead", "realign": True},
    "draft_model",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 3},
    "penalised": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
}
PROMPTS = [random_prompt(length, seed=length) for length in (1, 3 * WINDOW, 7)]


def strategy_of(name: Any, kind: str) -> Any:
    """Return a strategy; the draft is another model, run by the ``llama`` adapter too."""
    if name != "draft_model":
        return name
    draft = tiny_model(kind, seed=1)
    return {"name": name, "model": draft, "num_tokens": 3, "branches": [2, 2]}


@cache
def texts_of_hf(kind: str, mode: str) -> list[list[int]]:
    """Return what plain decoding through transformers' own forward makes of each prompt alone."""
    decoder = Decoder.from_model(tiny_model(kind), adapter="hf", strategy="autoregressive")
    return [
        decoder.generate(prompt, max_new_tokens=16, **OPTIONS[mode]).tokens for prompt in PROMPTS
    ]


CASES = [
    (kind, mode)
    for kind in LLAMA_FAMILY
    for mode in OPTIONS
    if mode != "penalised" or "-" not in kind  # what penalties see is no matter of the variant
]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_every_strategy_in_a_batch_and_alone(kind: str, mode: str) -> None:
    expected = texts_of_hf(kind, mode)
    assert len({tuple(text) for text in expected}) == len(PROMPTS)
    # Strategies do not know what a variant of the weights is: trees and a second model are enough.
    for name in STRATEGIES if "-" not in kind else ["lookahead", "draft_model"]:
        decoder = Decoder.from_model(
            tiny_model(kind), adapter="llama", strategy=strategy_of(name, kind), prefill_chunk=5
        )
        results = decoder.generate(PROMPTS, max_new_tokens=16, **OPTIONS[mode])
        assert [result.tokens for result in results] == expected, name
        if "-" not in kind:
            alone = decoder.generate(PROMPTS[1], max_new_tokens=16, **OPTIONS[mode])
            assert alone.tokens == expected[1], name


def test_log_probabilities_are_those_of_the_hf_adapter() -> None:
    entries = [
        Decoder.from_model(tiny_model("qwen2"), adapter=adapter)
        .generate(PROMPTS[1], max_new_tokens=12, logprobs=3)
        .logprobs
        for adapter in ("hf", "llama")
    ]
    for one, other in zip(*entries, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
