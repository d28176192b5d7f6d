"""The lean adapter on the real small model: the logits and the text of the ``hf`` adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decodekit import Decoder, DecoderConfig
from decodekit.decoder.build import build_adapter, load
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree

pytestmark = pytest.mark.e2e

PROMPTS = ["Why is the sky blue?", "def fibonacci(n):"]
TREE = TokenTree(tokens=(260, 314, 28, 523, 30, 216, 28), parents=(ROOT, 0, 0, 1, ROOT, 4, 5))


@pytest.fixture(scope="module")
def loaded() -> Any:
    """Return a model of this file's own, with its linear layers as they are."""
    return load(DecoderConfig(dtype="float32"))


def test_logits_after_a_prompt_and_a_tree(loaded: Any) -> None:
    model, tokenizer = loaded
    prompt = tuple(tokenizer(PROMPTS[0] * 20)["input_ids"])
    logits = []
    for name in ("hf", "llama"):
        adapter = build_adapter(model, adapter=name)
        assert adapter.name == name
        cache = adapter.new_cache(batch=1, capacity=len(prompt) + 16)
        adapter.forward([StepPlan(0, prompt[:-2])], cache)
        cache.commit([range(len(prompt) - 2)])
        logits += adapter.forward([StepPlan(len(prompt) - 2, prompt[-2:], TREE)], cache)
    assert logits[0].abs().max() > 10
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"]
)
def test_texts(loaded: Any, options: dict[str, Any]) -> None:
    plain = Decoder.from_model(*loaded, adapter="hf", strategy="autoregressive")
    lean = Decoder.from_model(*loaded, strategy="lookahead")
    assert lean.adapter_name == "llama"
    for prompt in PROMPTS:
        expected = plain.generate(prompt, max_new_tokens=24, **options)
        assert lean.generate(prompt, max_new_tokens=24, **options).tokens == expected.tokens


def test_the_model_writes_the_same_by_itself_afterwards(loaded: Any) -> None:
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    plain = Decoder.from_model(model, adapter="hf", strategy="autoregressive")
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
    )
    expected = plain.generate(ids[0].tolist(), max_new_tokens=16)
    assert generated[0, ids.shape[1] :].tolist() == expected.tokens
