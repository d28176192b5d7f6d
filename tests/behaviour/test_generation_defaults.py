"""What a model's ``generation_config`` asks for: honoured as ``model.generate`` does."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decodekit.cli.bench import contenders
from decodekit.cli.main import main
from decodekit.decoder.decoder import Decoder
from decodekit.decoder.generation_defaults import defaults_of
from decodekit.decoder.model_processors import EndBias
from decodekit.decoder.request import Request, request_of
from decodekit.errors import ConfigError
from decodekit.interfaces.sampling_params import SamplingParams
from tests.support.checkpoint import save_checkpoint
from tests.support.tiny import VOCABULARY, own_model, random_prompt

PROMPT = random_prompt(14)
COUNT = 24
STRATEGIES = ["autoregressive", "lookahead", "jacobi", "prompt_lookup"]


def model_with(**generation: Any) -> PreTrainedModel:
    """Return a tiny model whose ``generation_config`` says so."""
    model = own_model()
    for name, value in generation.items():
        assert hasattr(model.generation_config, name)
        setattr(model.generation_config, name, value)
    return model


def generated(model: PreTrainedModel, prompt: Sequence[int], **options: Any) -> list[int]:
    """Return the new tokens of transformers' own greedy decoding."""
    ids = torch.tensor([list(prompt)])
    options = {"do_sample": False, "max_new_tokens": COUNT, **options}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


PLAIN = generated(own_model(), PROMPT)
END = PLAIN[5]  # would end the text after six tokens

CONFIGS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "no repeated n-gram": {"no_repeat_ngram_size": 1},
    "least new tokens": {"min_new_tokens": 12, "eos_token_id": END},
    "least length": {"min_length": len(PROMPT) + 9, "eos_token_id": [END, PLAIN[6]]},
    "a least length that is reached": {"min_length": 3, "eos_token_id": END},
    "bad words": {"bad_words_ids": [[PLAIN[1]], PLAIN[3:5], [END]], "eos_token_id": END},
    "sequence bias": {"sequence_bias": [[[PLAIN[0]], -9.0], [[PROMPT[-1], 5], 90.0]]},
    "suppressed tokens": {"suppress_tokens": [PLAIN[0], PLAIN[2], -1, VOCABULARY + 3]},
    "suppressed at the start": {"begin_suppress_tokens": [PLAIN[0]]},
    "forced at the end": {"forced_eos_token_id": 7},
    "forced at the end, one of them suppressed": {
        "forced_eos_token_id": [7, 9],
        "suppress_tokens": [7],
    },
    "ever likelier to end": {
        "exponential_decay_length_penalty": (3, 1.5),
        "eos_token_id": PLAIN[-1] + 1,
    },
    "as Qwen2.5 has it": {
        "do_sample": True,
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
    },
    "several": {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "sequence_bias": [[[8], 4.0], [[PLAIN[0], 9], 5.0]],
        "begin_suppress_tokens": [8],
        "min_new_tokens": 9,
        "eos_token_id": END,
        "max_length": 4096,
    },
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_model_s_generation_config_gives_what_generate_gives(
    config: str, strategy: str
) -> None:
    model = model_with(**CONFIGS[config], pad_token_id=0)
    expected = generated(model, PROMPT)
    result = Decoder.from_model(model, strategy=strategy).generate(PROMPT, max_new_tokens=COUNT)
    assert result.tokens == expected


@pytest.mark.parametrize("config", sorted({*CONFIGS} - {"a least length that is reached"}))
def test_each_of_these_configurations_changes_the_text(config: str) -> None:
    """So that the test above would notice one that is ignored."""
    ends = {"eos_token_id": CONFIGS[config].get("eos_token_id"), "pad_token_id": 0}
    assert generated(model_with(**CONFIGS[config], pad_token_id=0), PROMPT) != generated(
        model_with(**ends), PROMPT
    )


def test_a_token_forced_at_the_start_comes_after_a_prompt_of_one_token() -> None:
    model = model_with(forced_bos_token_id=0, begin_suppress_tokens=[PLAIN[1]])
    for prompt in (PROMPT, PROMPT[:1]):
        result = Decoder.from_model(model).generate(prompt, max_new_tokens=8)
        assert result.tokens == generated(model, prompt, max_new_tokens=8)
    assert result.tokens[0] == 0


def test_one_setting_leaves_the_model_s_generation_config_alone() -> None:
    model = model_with(**CONFIGS["several"], pad_token_id=0)
    decoder = Decoder.from_model(model, generation_defaults=False)
    plain = generated(model_with(eos_token_id=END, pad_token_id=0), PROMPT)
    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == plain
    assert decoder.with_strategy("jacobi").generate(PROMPT, max_new_tokens=COUNT).tokens == plain


def test_another_strategy_over_the_same_model_honours_it_too() -> None:
    model = model_with(repetition_penalty=1.8)
    decoder = Decoder.from_model(model).with_strategy("autoregressive")
    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == generated(model, PROMPT)


def test_a_configuration_that_is_edited_later_holds_from_then_on() -> None:
    model = model_with()
    decoder = Decoder.from_model(model)
    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == PLAIN
    model.generation_config.repetition_penalty = 1.8
    changed = decoder.generate(PROMPT, max_new_tokens=COUNT).tokens
    assert changed == generated(model, PROMPT) != PLAIN


def resolved(
    defaults: dict[str, Any],
    options: dict[str, Any] | None = None,
    *,
    request: SamplingParams | None = None,
    decoder: SamplingParams | None = None,
) -> SamplingParams:
    """Return how tokens are chosen in the end."""
    found, _ = request_of(
        Request([1], sampling=request),
        options or {},
        decoder or SamplingParams(),
        defaults_of(model_with(**defaults), vocab_size=VOCABULARY),
    )
    assert found.sampling is not None
    return found.sampling


def test_who_goes_before_whom() -> None:
    """Keyword, then the request's sampling or the decoder's, then the model, then ours."""
    model = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "top_p": 0.8}
    kept = resolved(model, decoder=SamplingParams(no_repeat_ngram_size=5))
    assert (kept.repetition_penalty, kept.no_repeat_ngram_size) == (1.1, 5)
    kept = resolved(
        model,
        request=SamplingParams(no_repeat_ngram_size=6),
        decoder=SamplingParams(no_repeat_ngram_size=5, repetition_penalty=2.0),
    )
    assert (kept.repetition_penalty, kept.no_repeat_ngram_size) == (1.1, 6)
    kept = resolved(
        model, {"repetition_penalty": 1.0}, request=SamplingParams(repetition_penalty=3.0)
    )
    assert kept.repetition_penalty == 1.0, "a keyword counts though it is the default"


def test_filters_of_the_model_hold_where_the_caller_samples() -> None:
    model = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.02,
    }
    assert resolved(model) == SamplingParams(), "nothing turns sampling on by itself"
    kept = resolved(model, {"temperature": 1.5, "top_p": 0.5, "min_p": 0.0})
    assert kept == SamplingParams(
        temperature=1.5, top_k=20, top_p=0.5, typical_p=0.9, epsilon_cutoff=0.01, eta_cutoff=0.02
    )
    assert resolved({}, {"temperature": 1.0}).top_k == 0, "no filter that the model does not name"


def test_an_option_of_the_request_takes_the_place_of_ids_of_the_model() -> None:
    model = model_with(min_length=len(PROMPT) + 9, eos_token_id=END, pad_token_id=0)
    result = Decoder.from_model(model).generate(PROMPT, max_new_tokens=COUNT, min_new_tokens=0)
    assert result.tokens == PLAIN[:6]


def test_what_cannot_be_honoured_is_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(num_beams=4, guidance_scale=1.5, top_h=0.5, repetition_penalty=1.2)
    with caplog.at_level(logging.WARNING, logger="decodekit"):
        decoder = Decoder.from_model(model)
        decoder.generate(PROMPT, max_new_tokens=2)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the model's generation_config sets num_beams, guidance_scale, top_h, which decodekit does "
        "not do; model.generate does"
    )
    caplog.clear()
    Decoder.from_model(model, generation_defaults=False)
    Decoder.from_model(model_with(**CONFIGS["several"]))
    assert not caplog.records


def test_a_value_out_of_its_range_is_one_line_that_names_the_way_out() -> None:
    decoder = Decoder.from_model(model_with(top_k=-1, sequence_bias=[[3, 4]]))
    with pytest.raises(ConfigError, match=r"sequence_bias=.*model.generation_defaults=false"):
        decoder.generate(PROMPT)
    decoder = Decoder.from_model(model_with(top_k=-1))
    assert len(decoder.generate(PROMPT, max_new_tokens=2).tokens) == 2
    with pytest.raises(ConfigError, match=r"generation_config: top_k .*generation_defaults=false"):
        decoder.generate(PROMPT, temperature=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", 5),
        ("min_length", "3"),
        ("bad_words_ids", 3),
        ("bad_words_ids", [3]),
        ("forced_eos_token_id", VOCABULARY),
        ("forced_bos_token_id", [VOCABULARY + 2]),
    ],
)
def test_a_value_of_another_form_is_one_line_that_names_the_way_out(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*model.generation_defaults=false"):
        Decoder.from_model(model_with(**{name: value})).generate(PROMPT, max_new_tokens=2)


@pytest.mark.parametrize("given", [torch.tensor([END]), np.int64(END), torch.tensor(END), [END]])
def test_an_end_that_is_a_number_of_another_library_ends_the_text(given: Any) -> None:
    decoder = Decoder.from_model(model_with(eos_token_id=given))
    assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == PLAIN[:6]


def test_a_generation_config_without_an_end_has_none_whatever_the_model_s_config_says() -> None:
    model = model_with(eos_token_id=None)
    model.config.eos_token_id = END
    result = Decoder.from_model(model).generate(PROMPT, max_new_tokens=COUNT)
    assert result.tokens == generated(model, PROMPT) == PLAIN


def test_the_setting_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="generation_defaults must be true or false"):
        Decoder.from_model(own_model(), generation_defaults="no")


def test_an_ending_that_has_grown_beyond_all_numbers_is_still_a_number() -> None:
    processor = EndBias(start=0, factor=9.0, end_ids=(1,))
    scores = processor(torch.zeros(1, 5000, dtype=torch.int64), torch.tensor([[1.0, 2.0]]))
    assert torch.isfinite(scores).all()
    assert scores[0, 1] > 1e20


@pytest.mark.parametrize("honoured", [True, False])
def test_a_benchmark_treats_both_sides_alike(honoured: bool) -> None:
    model = model_with(repetition_penalty=1.8, num_beams=2, suppress_tokens=[PLAIN[0]])
    decoder = Decoder.from_model(model, generation_defaults=honoured)
    ours = contenders.strategy(decoder, "lookahead").run(PROMPT, COUNT)
    theirs = contenders.baseline(model, "greedy", generation_defaults=honoured).run(PROMPT, COUNT)
    assert ours.tokens == theirs.tokens
    assert (ours.tokens == PLAIN) == (not honoured)
    assert model.generation_config.num_beams == 2


def test_the_command_line_says_what_was_taken_from_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_checkpoint(tmp_path / "model")
    file = Path(path) / "generation_config.json"
    file.write_text(json.dumps({"repetition_penalty": 1.1, "top_k": 20, "do_sample": True}))
    settings = [f"model={path}", "prompt=ab", "max_new_tokens=3", "execution=eager"]
    assert main(settings) == 0
    line = "generation_config: repetition_penalty=1.1"
    assert line in capsys.readouterr().err.splitlines()
    assert main([*settings, "model.generation_defaults=false"]) == 0
    assert "generation_config" not in capsys.readouterr().err
    assert main([*settings, "format=json", "sampling.temperature=0.5"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["generation_config"] == {"repetition_penalty": 1.1, "top_k": 20}
    assert main([*settings, "job=verify"]) == 0
    assert line in capsys.readouterr().out
    assert main([*settings, "job=verify", "sampling.repetition_penalty=1.3"]) == 0
    assert "generation_config" not in capsys.readouterr().out
