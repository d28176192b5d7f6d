"""DRY against a slow implementation of its description, and its sequence breakers."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from decodekit.decoder.decoder import Decoder
from decodekit.decoder.dry_breakers import breaker_tokens
from decodekit.engine.dry import DryPenalty
from decodekit.errors import GenerationError
from tests.support.checkpoint import save_checkpoint
from tests.support.spelling import TOKENIZERS, ids_of, spelled
from tests.support.tiny import random_prompt, tiny_model

V = 5  # small, so that runs of tokens come again


def slow_penalties(
    prefix: list[int],
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Collection[int],
    last: int = 0,
    size: int = V,
) -> list[float]:
    """Return what each token costs: every token and every earlier place, letter by letter."""
    if last:
        prefix = prefix[-last:]
    costs = [0.0] * size
    for token in range(size):
        longest = 0
        for place in range(1, len(prefix)):
            if prefix[place] != token or token in breakers:
                continue
            length = 0
            while length < place:
                old, new = prefix[place - 1 - length], prefix[len(prefix) - 1 - length]
                if old != new or new in breakers:
                    break
                length += 1
            longest = max(longest, length)
        if longest >= allowed_length:
            costs[token] = multiplier * base ** (longest - allowed_length)
    return costs


@given(
    prefix=st.lists(st.integers(0, V - 1), min_size=1, max_size=30),
    multiplier=st.sampled_from([0.1, 0.8, 3.0]),
    base=st.sampled_from([1.0, 1.1, 1.75]),
    allowed_length=st.integers(1, 4),
    breakers=st.frozensets(st.integers(0, V - 1), max_size=2),
    last=st.integers(0, 12),
)
def test_it_equals_its_description(
    prefix: list[int],
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: frozenset[int],
    last: int,
) -> None:
    settings = {"multiplier": multiplier, "base": base, "allowed_length": allowed_length}
    expected = slow_penalties(prefix, **settings, breakers=breakers, last=last)  # type: ignore[arg-type]
    processor = DryPenalty(**settings, breakers=breakers, last=last)  # type: ignore[arg-type]
    scores = torch.arange(float(V))[None]
    changed = processor(torch.tensor([prefix]), scores)
    costs = (scores - changed)[0].tolist()
    assert costs == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert scores.tolist() == [[float(token) for token in range(V)]], "what is given is left alone"


@given(
    unit=st.lists(st.integers(0, V - 1), min_size=1, max_size=4),
    count=st.integers(30, 60),
    tail=st.lists(st.integers(0, V - 1), max_size=3),
    allowed_length=st.sampled_from([1, 3, 50]),
    breakers=st.frozensets(st.integers(0, V - 1), max_size=1),
)
@settings(max_examples=25)
def test_it_equals_its_description_in_a_text_that_repeats_itself(
    unit: list[int], count: int, tail: list[int], allowed_length: int, breakers: frozenset[int]
) -> None:
    prefix = (unit * count + tail + unit * count)[-120:]
    options = {"multiplier": 0.5, "base": 1.01, "allowed_length": allowed_length}
    expected = slow_penalties(prefix, **options, breakers=breakers)  # type: ignore[arg-type]
    processor = DryPenalty(**options, breakers=breakers)  # type: ignore[arg-type]
    changed = processor(torch.tensor([prefix]), torch.zeros(1, V, dtype=torch.float64))
    assert (-changed[0]).tolist() == pytest.approx(expected, rel=1e-6)


def test_a_long_repetition_costs_a_number_and_not_infinity() -> None:
    processor = DryPenalty(multiplier=2.0, base=4.0, allowed_length=2, breakers=frozenset())
    changed = processor(torch.zeros(1, 3000, dtype=torch.int64), torch.ones(1, V))
    assert torch.isfinite(changed).all()
    assert float(changed[0, 0]) < -1e36
    assert changed[0, 1:].tolist() == [1.0] * (V - 1)


def test_tokens_that_the_model_cannot_produce_change_nothing() -> None:
    processor = DryPenalty(multiplier=1.0, base=2.0, allowed_length=1, breakers=frozenset())
    scores = torch.ones(1, V)
    assert torch.equal(processor(torch.tensor([[1, V + 2, 1]]), scores), scores)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    path = save_checkpoint(tmp_path_factory.mktemp("words"))
    return PreTrainedTokenizerFast.from_pretrained(path)


def test_every_token_that_holds_a_breaker_is_one(tokenizer: PreTrainedTokenizerFast) -> None:
    w1 = [token for word, token in tokenizer.get_vocab().items() if "w1" in word]
    assert len(w1) > 2
    assert breaker_tokens(["w1"], tokenizer) >= set(w1)
    assert set(tokenizer.convert_tokens_to_ids(["a", "b"])).isdisjoint(
        breaker_tokens(["w1"], tokenizer)
    )


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_space_is_a_breaker_in_every_token_that_holds_it(kind: str) -> None:
    tokenizer = spelled(kind)
    words = ["▁Paris", "▁is", "▁yes", "▁"]
    assert breaker_tokens([" "], tokenizer) >= set(ids_of(tokenizer, *words))
    assert breaker_tokens([" "], tokenizer).isdisjoint(ids_of(tokenizer, "Paris", "yes"))
    assert breaker_tokens(["im_end"], tokenizer) >= {ids_of(tokenizer, "<|im_end|>")[0]}


@pytest.mark.parametrize("strategy", ["lookahead", "jacobi", "prompt_lookup"])
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.7, "xtc_probability": 0.5, "seed": 2}])
def test_every_strategy_gives_the_tokens_of_plain_decoding(
    strategy: str, sampled: dict[str, float], tokenizer: PreTrainedTokenizerFast
) -> None:
    model, prompt = tiny_model(), random_prompt(30)
    options = {"max_new_tokens": 30, "dry_multiplier": 4.0, "dry_allowed_length": 1, **sampled}
    plain = Decoder.from_model(model, tokenizer, strategy="autoregressive")
    decoder = Decoder.from_model(model, tokenizer, strategy=strategy)
    expected = plain.generate(prompt, **options)
    assert decoder.generate(prompt, **options).tokens == expected.tokens
    other = plain.generate(prompt, **{**options, "dry_multiplier": 0.0, "xtc_probability": 0.0})
    assert expected.tokens != other.tokens


def test_greedy_tokens_are_those_of_a_plain_loop() -> None:
    model, prompt = tiny_model(), random_prompt(20)
    tokens: list[int] = []
    while len(tokens) < 25:
        prefix = [*prompt, *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([prefix]), use_cache=False).logits[0, -1]
        settings = {"multiplier": 2.0, "base": 1.5, "allowed_length": 1, "breakers": ()}
        costs = slow_penalties(prefix, **settings, size=len(logits))  # type: ignore[arg-type]
        tokens.append(int((logits - torch.tensor(costs)).argmax()))
    result = Decoder.from_model(model).generate(
        prompt,
        max_new_tokens=25,
        dry_multiplier=2.0,
        dry_base=1.5,
        dry_allowed_length=1,
        dry_sequence_breakers=[],
    )
    assert result.tokens == tokens


def test_breakers_need_a_tokenizer() -> None:
    decoder = Decoder.from_model(tiny_model())
    with pytest.raises(GenerationError, match=r"dry_sequence_breakers=\[\]"):
        decoder.generate([1, 2], dry_multiplier=1.0)
