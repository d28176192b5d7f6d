"""Keys and values after acceptance are those of a plain prefill, in every layer and adapter.

The reference is ``transformers``' own cache after one plain pass over the text, masks and all.
"""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.llama import LlamaAdapter
from decodekit.backends.eager import EagerBackend
from decodekit.interfaces.plan import StepPlan
from decodekit.testing.laws import random_tree
from tests.support.tiny import (
    LLAMA_FAMILY,
    VOCABULARY,
    WINDOW,
    own_model,
    random_prompt,
    tiny_model,
)
from tests.support.zoo import ZOO

LENGTHS = (2 * WINDOW + 3, 5, 1)  # beyond every window, across it, and the least
STEPS = 6


@torch.no_grad()
def plain_rows(model: Any, text: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values [K, S, D] of each layer that a plain pass leaves."""
    cache = DynamicCache()  # made without the configuration, it keeps what windows pass over
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    model(torch.tensor([text]), use_cache=True, **{name: cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def rows_of(cache: Any, layer: int, index: int) -> tuple[Tensor, Tensor]:
    """Return the committed keys and values [K, S, D] of a layer, for one sequence."""
    if hasattr(cache, "rows"):
        keys, values = cache.rows(layer)
    else:
        keys, values = cache.layers[layer].keys, cache.layers[layer].values
    end = cache.lengths[index]
    return keys[index, :, :end], values[index, :, :end]


def accept_at_random(adapter: Any, seed: str) -> tuple[Any, list[list[int]]]:
    """Run steps of a ragged batch, commit paths with gaps; return the cache and what it holds."""
    choose = random.Random(seed)
    texts = [random_prompt(length, seed=length) for length in LENGTHS]
    cache = adapter.new_cache(batch=len(texts), capacity=100)
    adapter.forward([StepPlan(0, tuple(text)) for text in texts], cache)
    cache.commit([range(len(text)) for text in texts])
    for step in range(STEPS):
        plans, keep = [], []
        for text, length in zip(texts, cache.lengths, strict=True):
            limit = adapter.horizon(length + 2) if hasattr(adapter, "horizon") else None
            tree = random_tree(choose, choose.choice((0, 5, 9)), VOCABULARY, depth=5)
            if limit is not None:
                tree = tree.limited(nodes=len(tree), depth=limit - length - 2)
            plan = StepPlan(length, tuple(choose.choices(range(VOCABULARY), k=2)), tree)
            path = tree.path(choose.randrange(len(tree))) if len(tree) else ()
            keep.append([0, 1, *(2 + node for node in path)])
            text += [plan.tokens[row] for row in keep[-1]]
            plans.append(plan)
        adapter.forward(plans, cache)
        cache.commit(keep)
        if step == STEPS // 2:
            cache.keep([0, 2])
            del texts[1]
    assert cache.lengths == tuple(len(text) for text in texts)
    return cache, texts


def assert_plain(model: Any, cache: Any, texts: list[list[int]]) -> None:
    """Compare all committed rows with those of a plain pass over each text."""
    for index, text in enumerate(texts):
        plain = plain_rows(model, text)
        assert len(plain) == model.config.num_hidden_layers
        for layer, expected in enumerate(plain):
            for name, got, wanted in zip(
                ("keys", "values"), rows_of(cache, layer, index), expected, strict=True
            ):
                assert got.shape == wanted.shape
                gap = float((got - wanted).abs().max())
                where = f"{name} of layer {layer}, sequence {index} of {len(text)} rows"
                assert gap <= 1e-3 * (1 + float(wanted.abs().max())), f"{where}: off by {gap:.3g}"


@pytest.mark.parametrize("kind", list(ZOO))
def test_trap_13_the_hf_adapters_rows_are_those_of_a_plain_pass(kind: str) -> None:
    model = tiny_model(kind)
    assert_plain(model, *accept_at_random(HFAdapter(model, EagerBackend()), kind))


@pytest.mark.parametrize("kind", LLAMA_FAMILY)
def test_trap_13_the_llama_adapters_rows_are_those_of_a_plain_pass(kind: str) -> None:
    adapter = LlamaAdapter(own_model(kind), EagerBackend())
    assert_plain(tiny_model(kind), *accept_at_random(adapter, kind))
