"""The ``llama`` adapter: the logits of the ``hf`` adapter, row by row."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.llama import LlamaAdapter
from decodekit.adapters.llama.cache import LlamaCache
from decodekit.adapters.llama.rope import RotaryTable
from decodekit.backends.eager import EagerBackend
from decodekit.backends.sdpa import SDPABackend
from decodekit.errors import GenerationError
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree
from tests.support.tiny import (
    LLAMA_FAMILY,
    WINDOW,
    greedy_loop,
    logits_after,
    own_model,
    random_prompt,
    tiny_model,
)

TREE = TokenTree(tokens=(5, 9, 7, 7, 3, 11, 5, 8), parents=(ROOT, 0, 0, 1, ROOT, 4, 3, 5))
BACKENDS = {"eager": EagerBackend, "sdpa": SDPABackend}
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    # On logits of the order of 10. The norms are in float32 under float64 too, as in transformers.
    torch.float32: {"atol": 1e-4, "rtol": 1e-5},
    torch.float64: {"atol": 1e-9, "rtol": 1e-9},
}


def prefilled(adapter: Any, tokens: list[int], capacity: int = 96) -> Any:
    cache = adapter.new_cache(batch=1, capacity=capacity)
    adapter.forward([StepPlan(0, tuple(tokens))], cache)
    cache.commit([range(len(tokens))])
    return cache


def random_tree(choose: random.Random, nodes: int) -> TokenTree:
    return TokenTree(
        tuple(choose.randrange(64) for _ in range(nodes)),
        tuple(choose.randrange(-1, node) for node in range(nodes)),
    )


# --- the same logits -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", LLAMA_FAMILY)
def test_every_row_has_the_logits_of_the_hf_adapter(
    kind: str, backend: str, dtype: torch.dtype
) -> None:
    """Ragged batches of random trees, prompts in chunks, commits with gaps, past every window."""
    model = own_model(kind, dtype)
    adapters = [HFAdapter(own_model(kind, dtype), BACKENDS[backend]()), None]
    adapters[1] = LlamaAdapter(model, BACKENDS[backend]())
    caches = [adapter.new_cache(batch=3, capacity=128) for adapter in adapters]
    choose = random.Random(kind)
    for step in range(6):
        plans = [
            StepPlan(
                prefix,
                tuple(choose.randrange(64) for _ in range(choose.choice((1, 1, 4, 17)))),
                random_tree(choose, choose.choice((0, 1, 9))),
            )
            for prefix in caches[0].lengths
        ]
        expected, actual = (
            adapter.forward(plans, cache) for adapter, cache in zip(adapters, caches, strict=True)
        )
        for plan, wanted, got in zip(plans, expected, actual, strict=True):
            assert got.shape == (1 + len(plan.tree), 64)
            torch.testing.assert_close(got, wanted, **TOLERANCES[dtype])
        keep = [
            [*range(len(plan.pending)), *(len(plan.pending) + n for n in _path(choose, plan.tree))]
            for plan in plans
        ]
        for cache in caches:
            cache.commit(keep)
            if step == 3:
                cache.keep([0, 2])
    assert max(caches[1].lengths) > 2 * WINDOW
    for cache in caches:
        cache.reset()
    assert caches[0].lengths == caches[1].lengths == (0, 0, 0)


def _path(choose: random.Random, tree: TokenTree) -> tuple[int, ...]:
    return tree.path(choose.randrange(len(tree))) if len(tree) else ()


@pytest.mark.parametrize("kind", LLAMA_FAMILY)
def test_every_row_has_the_models_own_logits(kind: str) -> None:
    """Against the model as transformers runs it, with a mask of its own and no cache."""
    plain, adapter = tiny_model(kind), LlamaAdapter(own_model(kind), SDPABackend())
    tokens = random_prompt(2 * WINDOW + 5)
    cache = prefilled(adapter, tokens[:-2])
    (logits,) = adapter.forward([StepPlan(len(tokens) - 2, tuple(tokens[-2:]), TREE)], cache)
    for node in range(ROOT, len(TREE)):
        expected = logits_after(plain, [*tokens, *TREE.path_tokens(node)])
        torch.testing.assert_close(logits[node + 1], expected, **TOLERANCES[torch.float32])


def test_the_variants_are_no_variants_of_one_text() -> None:
    """Guards the tests above against features that have no effect on these models."""
    texts = {
        kind: tuple(greedy_loop(tiny_model(kind), random_prompt(30), 20)) for kind in LLAMA_FAMILY
    }
    # The window is the only difference between the two, and full Mistral is LLaMA.
    assert texts.pop("mistral-full") == texts["llama"]
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_trap_20_poison(kind: str, backend: str) -> None:
    """A token that a row must not see can change without moving the row's logits by a bit."""
    adapter = LlamaAdapter(own_model(kind), BACKENDS[backend]())
    tokens = random_prompt(WINDOW + 4)
    plan = StepPlan(len(tokens), (2,), TREE)
    (before,) = adapter.forward([plan], prefilled(adapter, tokens))
    for poisoned in range(len(TREE)):
        changed = list(TREE.tokens)
        changed[poisoned] += 20
        tree = TokenTree(tuple(changed), TREE.parents)
        (after,) = adapter.forward([StepPlan(len(tokens), (2,), tree)], prefilled(adapter, tokens))
        for node in range(ROOT, len(TREE)):
            seen = poisoned in TREE.path(node)
            assert torch.equal(after[node + 1], before[node + 1]) is not seen


@pytest.mark.parametrize("path", [(), (0, 1, 3, 6), (4, 5, 7), (0, 2)], ids=str)
def test_trap_13_keys_and_values_after_acceptance_are_those_of_a_plain_prefill(
    path: tuple[int, ...],
) -> None:
    adapter = LlamaAdapter(own_model(), SDPABackend())
    prompt = random_prompt(9)
    cache = prefilled(adapter, prompt)
    adapter.forward([StepPlan(9, (6, 2), TREE)], cache)
    cache.commit([[0, 1, *(2 + node for node in path)]])
    tokens = [*prompt, 6, 2, *(TREE.tokens[node] for node in path)]
    assert cache.lengths == (len(tokens),)
    plain = prefilled(adapter, tokens)
    for layer in range(2):
        for got, expected in zip(cache.rows(layer), plain.rows(layer), strict=True):
            length = len(tokens)
            torch.testing.assert_close(
                got[:, :, :length], expected[:, :, :length], **TOLERANCES[torch.float32]
            )


def test_positions_beyond_the_tables_make_them_grow() -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    table = RotaryTable(rotary, dtype=torch.float32, device=torch.device("cpu"))
    for last in (0, 255, 256, 3000, 7):
        positions = torch.tensor([[0, last]])
        cos, sin = table.at(positions, end=last + 1)
        wanted_cos, wanted_sin = rotary(torch.empty(0), positions)
        assert torch.equal(cos[:, :, 0], wanted_cos)
        assert torch.equal(sin.abs()[:, :, 0], wanted_sin.abs())


# --- the cache -----------------------------------------------------------------------------------


def test_cache_memory_is_taken_once_and_kept() -> None:
    adapter = LlamaAdapter(own_model(), SDPABackend())
    cache = prefilled(adapter, random_prompt(10))
    before = cache.rows(0)[0].data_ptr()
    for _ in range(5):
        adapter.forward([StepPlan(cache.lengths[0], (3,), TREE)], cache)
        cache.commit([[0, 5, 6]])
    cache.reset()
    adapter.forward([StepPlan(0, (3,))], cache)
    assert cache.rows(0)[0].data_ptr() == before
    assert cache.rows(1)[1].untyped_storage().data_ptr() == before  # one allocation for all layers


def test_what_does_not_fit_is_an_error_not_an_overflow() -> None:
    adapter = LlamaAdapter(own_model(), SDPABackend())
    cache = prefilled(adapter, random_prompt(10), capacity=12)
    with pytest.raises(GenerationError, match="9 rows do not fit behind 10 in a cache of 12"):
        adapter.forward([StepPlan(10, (3,), TREE)], cache)
    with pytest.raises(GenerationError, match="do not fit a cache that holds"):
        adapter.forward([StepPlan(4, (3,))], cache)
    foreign = HFAdapter(own_model(), SDPABackend()).new_cache(batch=1, capacity=4)
    with pytest.raises(GenerationError, match="cannot use a HFCache"):
        adapter.forward([StepPlan(0, (3,))], foreign)
    assert isinstance(cache, LlamaCache)
    assert cache.lengths == (10,)
