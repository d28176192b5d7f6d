"""The Python interface: prompts of every form, options, streams, results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import decodekit
from decodekit import Decoder, DecoderConfig, GenerationResult
from decodekit.adapters.hf import HFAdapter
from decodekit.errors import CheckpointError, ConfigError, GenerationError
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.strategies.jacobi import JacobiConfig
from decodekit.strategies.lookahead.proposer import LookaheadConfig
from tests.support.tiny import greedy_loop, random_prompt, tiny_model


@pytest.fixture(scope="module")
def decoder(checkpoint: str) -> Decoder:
    return Decoder.from_config(strategy="lookahead", model=checkpoint, max_new_tokens=12)


def test_from_config_takes_names_mappings_dataclasses_and_dictconfigs(checkpoint: str) -> None:
    nested = {"strategy": {"name": "jacobi", "window_size": 3}, "model": {"path": checkpoint}}
    decoders = [
        Decoder.from_config(strategy="jacobi", model=checkpoint),
        Decoder.from_config({"strategy": "jacobi"}, model={"path": checkpoint}),
        Decoder.from_config(nested),
        Decoder.from_config(OmegaConf.create(nested)),
        Decoder.from_config(
            DecoderConfig(
                strategy=JacobiConfig(window_size=3),
                model=decodekit.interfaces.component.ModelConfig(path=checkpoint),
            )
        ),
    ]
    results = [one.generate("a b c", max_new_tokens=6).tokens for one in decoders]
    assert all(tokens == results[0] for tokens in results)
    assert [one.strategy.max_nodes for one in decoders] == [8, 8, 3, 3, 3]


def test_from_config_mistakes(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match="unknown strategy 'lookahed': did you mean 'lookahead'"):
        Decoder.from_config(strategy="lookahed")
    with pytest.raises(ConfigError, match="unknown key 'stratgy': did you mean 'strategy'"):
        Decoder.from_config(stratgy="lookahead")
    with pytest.raises(CheckpointError, match="nowhere"):
        Decoder.from_config(model={"path": "/nowhere"})
    with pytest.raises(ConfigError, match="dtype"):
        Decoder.from_config(model=checkpoint, dtype="float31")
    with pytest.raises(TypeError, match="not both"):
        Decoder.from_config(DecoderConfig(), strategy="jacobi")


def test_from_model_mistakes() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'sdpaa': did you mean 'sdpa'"):
        Decoder.from_model(tiny_model(), backend="sdpaa")
    with pytest.raises(ConfigError, match="unknown key 'window' in 'strategy': did you mean"):
        Decoder.from_model(tiny_model(), strategy={"name": "lookahead", "window": 3})
    with pytest.raises(ConfigError, match="'jacobi' takes a JacobiConfig, not a LookaheadConfig"):
        Decoder.from_model(tiny_model(), strategy=LookaheadConfig(name="jacobi"))


def test_a_prompt_may_be_text_ids_tensors_or_messages(decoder: Decoder) -> None:
    text = "b c d e f"
    ids = decoder.tokenizer(text)["input_ids"]
    expected = decoder.generate(text, chat=False)
    forms: list[Any] = [ids, tuple(ids), torch.tensor(ids), torch.tensor([ids])]
    for form in forms:
        assert decoder.generate(form).tokens == expected.tokens
    chat = decoder.generate(text)  # the checkpoint has a template
    assert chat.prompt_tokens == decoder.tokenizer("<u> b c d e f <a>")["input_ids"]
    assert decoder.generate([{"role": "user", "content": text}]).tokens == chat.tokens
    assert decoder.generate(text, chat=True).tokens == chat.tokens


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, 64], "token id 64 is outside the vocabulary, 0 .. 63"),
        ([1, -1], "token id -1 is outside"),
        ([1.5], "text, token ids or chat messages; it holds 1.5"),
        ([True], "holds True"),
        (torch.ones((1, 2, 3), dtype=torch.long), r"holds \[1, 1, 1\]"),
        ([3] * 128, "128 tokens and the model's context is 128; shorten"),
        ("", "prompt is empty"),
        ([], "the list is empty"),
    ],
)
def test_bad_prompts_get_one_line(decoder: Decoder, prompt: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message) as caught:
        decoder.generate(prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, not -1"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"min_p": 2.0}, "min_p must be in"),
        ({"seed": -1}, "seed must be in"),
        ({"stop": ""}, "stop string must not be empty"),
    ],
)
def test_bad_options_get_one_line(decoder: Decoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder.generate("a b", **options)


def test_text_needs_a_tokenizer_and_messages_a_template() -> None:
    plain = Decoder.from_model(tiny_model())
    assert plain.generate([3, 4], max_new_tokens=4).text == ""
    with pytest.raises(GenerationError, match="needs a tokenizer"):
        plain.generate("hello")
    with pytest.raises(GenerationError, match="no chat template"):
        plain.generate([{"role": "user", "content": "hello"}])
    with pytest.raises(GenerationError, match="stop strings need a tokenizer"):
        plain.generate([3, 4], stop="x")


def test_the_result_says_how_it_went(decoder: Decoder) -> None:
    prompt = random_prompt(10)
    result = decoder.generate(prompt, max_new_tokens=30)
    assert isinstance(result, GenerationResult)
    stats = result.stats
    assert len(result.tokens) == stats.tokens == 30
    whole = decoder.tokenizer.decode(prompt + result.tokens)
    assert decoder.tokenizer.decode(prompt) + result.text == whole
    assert stats.tokens_per_step == 30 / stats.steps
    assert stats.rows_per_step == 1 + stats.nodes / stats.steps > 1
    assert 0 < stats.time_to_first_token < stats.seconds
    assert stats.tokens_per_second == 30 / stats.seconds
    assert result.finish_reason == "length"


def test_stats_of_nothing() -> None:
    stats = Decoder.from_model(tiny_model()).generate([3], max_new_tokens=0).stats
    assert (stats.steps, stats.tokens_per_step, stats.rows_per_step) == (0, 0.0, 0.0)
    assert (stats.tokens_per_second, stats.time_to_first_token) == (0.0, 0.0)


def test_a_stream_gives_accepted_runs_and_then_the_result(decoder: Decoder) -> None:
    stream = decoder.stream(random_prompt(10), max_new_tokens=30)
    assert stream.result.tokens == []
    assert stream.result.finish_reason is None
    chunks = list(stream)
    assert len(chunks) == stream.result.stats.steps
    assert "".join(chunk.text for chunk in chunks) == stream.result.text
    assert chunks[-1].finish_reason == "length"
    assert stream.result.tokens == decoder.generate(random_prompt(10), max_new_tokens=30).tokens


def test_an_option_of_a_request_is_no_setting_of_a_decoder(checkpoint: str) -> None:
    for name, value in (("stop", "x"), ("constraint", {"regex": "a"}), ("logprobs", 1)):
        with pytest.raises(ConfigError, match=f"{name} belongs to a request: Decoder.generate"):
            Decoder.from_config(model=checkpoint, **{name: value})


@pytest.mark.parametrize("model", ["/a/path", None, 3, tiny_model])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match="must be a loaded transformers model, not") as caught:
        Decoder.from_model(model)
    assert caught.value.key == "model"


def test_what_is_no_tokenizer_is_named() -> None:
    with pytest.raises(ConfigError, match="must be a transformers tokenizer, not 'llama'"):
        Decoder.from_model(tiny_model(), "llama")  # type: ignore[arg-type]


def test_defaults_come_from_the_config_and_requests_go_before(checkpoint: str) -> None:
    one = Decoder.from_config(
        model=checkpoint,
        max_new_tokens=7,
        sampling={"temperature": 0.9, "seed": 5},
    )
    default = one.generate([3, 4, 5])
    assert len(default.tokens) == 7
    assert one.generate([3, 4, 5], temperature=0.9, seed=5).tokens == default.tokens
    assert one.generate([3, 4, 5], seed=7).tokens != default.tokens
    assert one.generate([3, 4, 5], temperature=0).tokens == greedy_loop(
        one.adapter.model, [3, 4, 5], 7
    )


def test_top_k_top_p_and_min_p_each_matter() -> None:
    plain = Decoder.from_model(tiny_model())
    base = {"max_new_tokens": 20, "temperature": 3.0}
    texts = [
        plain.generate([5, 6], **base, **extra).tokens
        for extra in ({}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.3}, {"seed": 1})
    ]
    assert all(a != b for i, a in enumerate(texts) for b in texts[:i])


def test_with_strategy_shares_the_model(decoder: Decoder) -> None:
    other = decoder.with_strategy("autoregressive")
    assert other.adapter is decoder.adapter
    result = other.generate(random_prompt(9))
    assert result.tokens == decoder.generate(random_prompt(9)).tokens
    assert result.stats.tokens_per_step == 1


def test_from_model_takes_text_as_it_is(checkpoint: str) -> None:
    loaded = Decoder.from_config(model=checkpoint)
    model = loaded.adapter.model
    plain = Decoder.from_model(model, loaded.tokenizer)
    assert plain.generate("a b").prompt_tokens == loaded.tokenizer("a b")["input_ids"]
    chat = Decoder.from_model(model, loaded.tokenizer, chat=None)
    assert chat.generate("a b").prompt_tokens == loaded.tokenizer("<u> a b <a>")["input_ids"]


def test_settings_of_the_decoder_itself() -> None:
    model = tiny_model()
    one = Decoder(
        HFAdapter(model, decodekit.decoder.build.build_adapter(model).backend),
        strategy=decodekit.decoder.build.build_strategy("jacobi"),
        sampling=SamplingParams(temperature=0.5),
        prefill_chunk=3,
    )
    long = Decoder.from_model(model, strategy="jacobi", sampling=SamplingParams(temperature=0.5))
    prompt = random_prompt(20)
    assert one.generate(prompt, max_new_tokens=9).tokens == (
        long.generate(prompt, max_new_tokens=9).tokens
    )
