"""Log-probabilities of prompts and of given texts, against the model's own forward pass."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decodekit.cli.main import main
from decodekit.decoder.decoder import Decoder
from decodekit.decoder.request import Request
from decodekit.engine.logprobs import TokenLogprob
from decodekit.errors import ConfigError, GenerationError
from tests.support.native import native_model, needs_compiler
from tests.support.tiny import VOCABULARY, logits_after, own_model, random_prompt, tiny_model

PROMPT = random_prompt(23)


@torch.no_grad()
def expected_rows(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Return the log-probabilities [L - 1, V] after all but the last token, in one plain pass."""
    logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(dim=-1)


def check(
    found: list[TokenLogprob | None] | None,
    model: PreTrainedModel,
    tokens: Sequence[int],
    *,
    top: int = 0,
    rows: Tensor | None = None,
) -> None:
    assert found is not None
    assert found[0] is None
    entries = [one for one in found if one is not None]
    assert [one.token for one in entries] == list(tokens[1:])
    rows = expected_rows(model, tokens) if rows is None else rows
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        best = row.topk(top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 22, 512])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2"])
def test_a_text_is_scored_as_by_a_plain_pass(kind: str, chunk: int) -> None:
    """Whatever the size of a piece; with positions, windows and caps of several families."""
    model = tiny_model(kind)
    decoder = Decoder.from_model(model, prefill_chunk=chunk)
    found = decoder.score(PROMPT, logprobs=3)
    assert not isinstance(found, list)
    check(found.logprobs, model, PROMPT, top=3)
    rows = expected_rows(model, PROMPT)
    total = float(rows.gather(1, torch.tensor(PROMPT[1:])[:, None]).sum())
    assert found.total == pytest.approx(total, abs=1e-3)
    assert found.perplexity == pytest.approx(math.exp(-total / (len(PROMPT) - 1)), rel=1e-3)
    assert found.tokens == PROMPT


@needs_compiler
def test_native_execution_scores_to_the_bit_whatever_the_pieces() -> None:
    model = native_model()
    scores = [
        Decoder.from_model(model, execution="native", prefill_chunk=chunk).score(PROMPT)
        for chunk in (1, 7, 512)
    ]
    assert scores[0] == scores[1] == scores[2]
    check(scores[0].logprobs, model, PROMPT)  # type: ignore[union-attr]


def test_packed_weights_score_alike() -> None:
    decoder = Decoder.from_model(own_model(), execution="packed")
    check(decoder.score(PROMPT).logprobs, tiny_model(), PROMPT)  # type: ignore[union-attr]


def test_a_list_of_texts_is_scored_together() -> None:
    model = tiny_model()
    decoder = Decoder.from_model(model, prefill_chunk=5)
    texts = [PROMPT, [3], PROMPT[:7], PROMPT[4:16]]
    found = decoder.score(texts)
    assert isinstance(found, list)
    for text, score in zip(texts, found, strict=True):
        assert score.tokens == text
        check(score.logprobs, model, text)
    assert found[1].logprobs == [None]
    assert found[1].total == 0.0
    assert math.isnan(found[1].perplexity)
    assert decoder.score([]) == []


@pytest.mark.parametrize("strategy", ["autoregressive", "lookahead", "prompt_lookup"])
@pytest.mark.parametrize("chunk", [3, 512])
def test_the_log_probabilities_of_a_prompt_come_with_its_answer(strategy: str, chunk: int) -> None:
    """And the answer is the one without them; processors do not change them."""
    model = tiny_model()
    decoder = Decoder.from_model(model, strategy=strategy, prefill_chunk=chunk)
    options: dict[str, Any] = {"max_new_tokens": 12, "repetition_penalty": 1.5, "logprobs": 1}
    plain = decoder.generate(PROMPT, **options)
    result = decoder.generate(PROMPT, **options, prompt_logprobs=2)
    check(result.prompt_logprobs, model, PROMPT, top=2)
    assert result.tokens == plain.tokens
    assert result.logprobs is not None
    assert plain.logprobs is not None
    assert [one.logprob for one in result.logprobs] == pytest.approx(
        [one.logprob for one in plain.logprobs], abs=1e-4
    )
    assert plain.prompt_logprobs is None


def test_a_prompt_is_scored_though_nothing_is_to_follow() -> None:
    model = tiny_model()
    result = Decoder.from_model(model).generate(PROMPT, max_new_tokens=0, prompt_logprobs=0)
    assert result.tokens == []
    assert result.finish_reason == "length"
    check(result.prompt_logprobs, model, PROMPT)


def test_in_a_batch_each_request_says_for_itself() -> None:
    model = tiny_model()
    decoder = Decoder.from_model(model, prefill_chunk=6)
    asked = [
        Request(PROMPT, max_new_tokens=10, prompt_logprobs=1),
        Request(PROMPT[:9], max_new_tokens=10),
        Request(PROMPT[:5], max_new_tokens=0, prompt_logprobs=0),
        Request([7], max_new_tokens=10, prompt_logprobs=0),
    ]
    results = decoder.generate(asked)
    check(results[0].prompt_logprobs, model, PROMPT, top=1)
    assert results[1].prompt_logprobs is None
    check(results[2].prompt_logprobs, model, PROMPT[:5])
    assert results[3].prompt_logprobs == [None]
    alone = [decoder.generate(one, max_new_tokens=10).tokens for one in (PROMPT, PROMPT[:9], [7])]
    assert [results[place].tokens for place in (0, 1, 3)] == alone
    assert results[2].tokens == []


def test_a_stream_that_is_cancelled_while_its_prompt_is_scored_ends() -> None:
    decoder = Decoder.from_model(tiny_model(), prefill_chunk=2)
    stream = decoder.stream(PROMPT, prompt_logprobs=0)
    stream.cancel()
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"


def test_a_text_over_the_border_of_longrope_is_scored_as_it_is_decoded() -> None:
    """Each token under the frequencies that hold for the text before it."""
    kind = "phi3-longrope"
    model = tiny_model(kind)
    border = model.config.rope_parameters["original_max_position_embeddings"]
    text = random_prompt(border + 9)
    rows = torch.stack([logits_after(model, text[:end]) for end in range(1, len(text))])
    rows = rows.log_softmax(dim=-1)
    for chunk in (4, 512):
        found = Decoder.from_model(model, prefill_chunk=chunk).score(text)
        assert not isinstance(found, list)
        check(found.logprobs, model, text, rows=rows)


def test_the_command_line_shows_the_prompt_s_log_probabilities(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"model={checkpoint}", "prompt=a b c", "max_new_tokens=2"]
    assert main([*settings, "prompt_logprobs=1", "format=json"]) == 0
    record = json.loads(capsys.readouterr().out)
    first, *rest = record["prompt_logprobs"]
    assert first is None
    assert len(rest) == record["prompt_tokens"] - 1
    assert all(one["logprob"] < 0 and len(one["top"]) == 1 for one in rest)
    assert main([*settings, "prompt_logprobs=1"]) == 2
    assert "prompt_logprobs need format=json" in capsys.readouterr().err


def test_a_text_as_long_as_the_context_is_scored() -> None:
    model = tiny_model()
    decoder = Decoder.from_model(model, max_positions=12)
    text = PROMPT[:12]
    found = decoder.score(text)
    assert not isinstance(found, list)
    check(found.logprobs, model, text)
    answer = decoder.generate(text, max_new_tokens=0, prompt_logprobs=0)
    assert (answer.tokens, answer.prompt_logprobs) == ([], found.logprobs)
    with pytest.raises(GenerationError, match="13 tokens and the model's context is 12; shorten"):
        decoder.score(PROMPT[:13])
    with pytest.raises(GenerationError, match="leave room for an answer"):
        decoder.generate(text, max_new_tokens=1)


def test_what_a_tokenizer_returns_is_scored_without_its_padding() -> None:
    decoder = Decoder.from_model(tiny_model())
    texts = [PROMPT[:5], PROMPT[5:8]]
    expected = decoder.score(texts)
    ids = torch.tensor([texts[0], [0, 0, *texts[1]]])
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    assert decoder.score({"input_ids": ids, "attention_mask": mask}) == expected
    assert decoder.score(input_ids=ids, attention_mask=mask) == expected
    assert decoder.score(torch.tensor(texts[:1])) == decoder.score(texts[0])
    with pytest.raises(ConfigError, match="score has no option 'max_new_tokens'"):
        decoder.score(texts, max_new_tokens=3)


def test_mistakes_are_named() -> None:
    decoder = Decoder.from_model(tiny_model())
    with pytest.raises(ConfigError, match="chat must be true or false"):
        decoder.score(PROMPT, chat="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prompt_logprobs must be"):
        decoder.generate(PROMPT, prompt_logprobs=-1)
    with pytest.raises(ConfigError, match="logprobs must be"):
        decoder.score(PROMPT, logprobs=True)
    with pytest.raises(GenerationError, match="empty"):
        decoder.score([[3], []])
    with pytest.raises(GenerationError, match=str(VOCABULARY + 9)):
        decoder.score([VOCABULARY + 9])
