"""How long a text may be: what the configuration and its RoPE scaling say, or ``max_positions``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PhimoeConfig

from decodekit import Decoder
from decodekit.adapters.model_facts import max_positions_of
from decodekit.cli.main import main
from decodekit.config.compose import compose_config
from decodekit.errors import ConfigError, GenerationError, ModelSupportError
from tests.support.tiny import built, greedy_loop, own_model, random_prompt
from tests.support.zoo import ZOO, Kind

# As Qwen documents it: the length is left as it was.
YARN = Kind(
    title="",
    type="qwen2",
    settings={
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
)


@pytest.mark.parametrize("adapter", ["hf", "llama"])
def test_yarn_as_qwen_documents_it_has_four_times_the_positions(adapter: str) -> None:
    model = built(YARN)
    decoder = Decoder.from_model(model, adapter=adapter)
    assert decoder.adapter.max_positions == 256
    prompt = random_prompt(60)
    result = decoder.generate(prompt, max_new_tokens=24)
    own = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert (result.tokens, result.finish_reason) == (own[0, 60:].tolist(), "length")
    prompt = random_prompt(250, seed=1)  # the tables of RoPE reach that far
    result = decoder.generate(prompt, max_new_tokens=24)
    assert (result.tokens, result.finish_reason) == (greedy_loop(model, prompt, 6), "capacity")


def yarn(factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }


@pytest.mark.parametrize(
    ("limit", "rope", "expected"),
    [
        (4096, None, 4096),
        (4096, {"rope_type": "default"}, 4096),
        (None, yarn(4.0, 4096), None),
        (32768, yarn(4.0, 32768), 131072),  # Qwen2.5
        (40960, yarn(4.0, 32768), 131072),  # Qwen3
        (163840, yarn(40.0, 4096), 163840),  # DeepSeek-V3
        (32768, {**yarn(4.0, 32768), "rope_type": None, "type": "yarn"}, 131072),
        (4096, {"rope_type": "linear", "factor": 4.0}, 16384),
        (16384, {"rope_type": "linear", "factor": 4.0, **yarn(4, 4096), "type": "linear"}, 16384),
        (131072, {**yarn(32.0, 8192), "rope_type": "llama3"}, 131072),  # LLaMA 3.2
        (8192, {**yarn(8.0, 8192), "rope_type": "llama3"}, 65536),
        (131072, {"rope_type": "longrope", "original_max_position_embeddings": 4096}, 131072),
        (4096, {**yarn(32.0, 4096), "rope_type": "longrope"}, 131072),
        (4096, {"rope_type": "dynamic", "factor": 4.0}, 4096),
        (
            131072,  # Gemma 3
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            },
            131072,
        ),
        (
            8192,
            {"full_attention": yarn(8.0, 8192), "sliding_attention": {"rope_type": "default"}},
            65536,
        ),
    ],
)
def test_what_the_scaling_says_where_it_is_more(limit: Any, rope: Any, expected: Any) -> None:
    config = SimpleNamespace(max_position_embeddings=limit, rope_parameters=rope)
    assert max_positions_of(SimpleNamespace(config=config)) == expected


def test_a_limit_of_ones_own_may_be_lower_or_higher() -> None:
    model = own_model()  # of 128 positions
    prompt = random_prompt(120)
    expected = greedy_loop(model, prompt, 40)
    for adapter in ("hf", "llama"):
        longer = Decoder.from_model(model, adapter=adapter, max_positions=150)
        result = longer.generate(prompt, max_new_tokens=40)
        assert (result.tokens, result.finish_reason) == (expected[:30], "capacity")
        shorter = Decoder.from_model(model, adapter=adapter, max_positions=30)
        assert shorter.generate(prompt[:25], max_new_tokens=9).finish_reason == "capacity"
        with pytest.raises(GenerationError, match=r"context is 30;.*model\.max_positions sets"):
            shorter.generate(prompt)


@pytest.mark.parametrize("kind", ["gpt2", "gptj"])
def test_positions_that_come_from_a_table_end_with_it(kind: str) -> None:
    with pytest.raises(
        ConfigError, match=r"max_positions=129 is more than the 128 .* from a table"
    ):
        Decoder.from_model(own_model(kind), max_positions=129)
    assert Decoder.from_model(own_model(kind), max_positions=99).adapter.max_positions == 99


def test_a_window_that_no_text_reached_is_refused_where_longer_ones_may() -> None:
    settings = {**ZOO["phi3"].shape, "sliding_window": 128, "num_local_experts": 2}
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(PhimoeConfig(**settings)).eval()
    Decoder.from_model(model)
    with pytest.raises(ModelSupportError, match="the window of its masks has 128 positions"):
        Decoder.from_model(model, max_positions=256)


def test_the_setting_of_the_command_line(
    capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    assert compose_config(["model.max_positions=77"]).model.max_positions == 77
    arguments = [f"model={checkpoint}", "prompt=a b c d e", "max_new_tokens=4"]
    assert main([*arguments, "model.max_positions=9"]) == 0
    assert "(capacity)" in capsys.readouterr().err
    assert main([*arguments, "model.max_positions=5"]) == 1
    assert "model's context is 5" in capsys.readouterr().err
    assert main([*arguments, "model.max_positions=0"]) == 2
    assert "max_positions must be 1 or more" in capsys.readouterr().err
