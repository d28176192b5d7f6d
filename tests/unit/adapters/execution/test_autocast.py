"""Decoding inside ``torch.autocast`` is decoding outside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decodekit import Decoder
from decodekit.adapters.execution.packed import can_pack
from decodekit.engine.autocast import outside_autocast
from tests.support.native import native_model, needs_compiler
from tests.support.tiny import random_prompt

SETTINGS: list[dict[str, Any]] = [
    {"adapter": "llama"},
    {"adapter": "hf"},
    {"adapter": "llama", "execution": "packed"},
    {"adapter": "hf", "execution": "packed"},
    pytest.param({"execution": "native"}, marks=needs_compiler),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_autocast_around_the_call_changes_nothing(settings: dict[str, Any]) -> None:
    if settings.get("execution") == "packed" and not can_pack(torch.float32):
        pytest.skip("this build of torch cannot pack linear layers")
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.9, "seed": 3, "logprobs": 1}
    prompt = random_prompt(15)
    expected = Decoder.from_model(native_model(), **settings).generate(prompt, **options)
    with torch.autocast("cpu", torch.bfloat16):
        decoder = Decoder.from_model(native_model(), **settings)
        result = decoder.generate(prompt, **options)
        for _ in decoder.stream(prompt, max_new_tokens=3):
            assert torch.is_autocast_enabled("cpu")  # what the reader does is its business
    assert result.tokens == expected.tokens
    assert result.logprobs == expected.logprobs


def test_it_is_on_again_afterwards() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with outside_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    with outside_autocast():
        assert not torch.is_autocast_enabled("cpu")
