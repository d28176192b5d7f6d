"""The ``hf`` adapter: every node's logits are the model's logits for its path."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    PhimoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.hf.cache import HFCache
from decodekit.backends.eager import EagerBackend
from decodekit.backends.flash import FlashBackend
from decodekit.backends.sdpa import SDPABackend
from decodekit.errors import BackendError, GenerationError, ModelSupportError
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.testing.adapter_unseen import check_unseen_tokens
from decodekit.testing.subject import Subject
from tests.support.tiny import WINDOW, logits_after, own_model, random_prompt, tiny_model
from tests.support.zoo import ZOO

TREE = TokenTree(tokens=(5, 9, 7, 7, 3, 11, 5, 8), parents=(ROOT, 0, 0, 1, ROOT, 4, 3, 5))
BACKENDS = {"eager": EagerBackend, "flash": FlashBackend, "sdpa": SDPABackend}
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}  # of float32, on logits of the order of 100


def prefilled(adapter: HFAdapter, tokens: list[int], capacity: int = 96) -> HFCache:
    cache = adapter.new_cache(batch=1, capacity=capacity)
    adapter.forward([StepPlan(0, tuple(tokens))], cache)
    cache.commit([range(len(tokens))])
    return cache


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gpt2"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prefix", [0, 5, 2 * WINDOW + 3])
def test_every_row_has_the_logits_of_its_path(kind: str, backend: str, prefix: int) -> None:
    model = tiny_model(kind)
    adapter = HFAdapter(model, BACKENDS[backend]())
    tokens = random_prompt(prefix + 3)
    cache = adapter.new_cache(batch=1, capacity=96)
    if prefix:
        adapter.forward([StepPlan(0, tuple(tokens[:prefix]))], cache)
        cache.commit([range(prefix)])
    (logits,) = adapter.forward([StepPlan(prefix, tuple(tokens[prefix:]), TREE)], cache)
    assert logits.shape == (1 + len(TREE), 64)
    for node in range(ROOT, len(TREE)):
        expected = logits_after(model, [*tokens, *TREE.path_tokens(node)])
        torch.testing.assert_close(logits[node + 1], expected, **TOLERANCE)


def test_softcapping_is_the_models_own_under_eager() -> None:
    model = tiny_model("gemma2")
    adapter = HFAdapter(model, EagerBackend())
    tokens = random_prompt(2 * WINDOW)
    cache = prefilled(adapter, tokens[:-1])
    (logits,) = adapter.forward([StepPlan(len(tokens) - 1, (tokens[-1],), TREE)], cache)
    for node in range(ROOT, len(TREE)):
        expected = logits_after(model, [*tokens, *TREE.path_tokens(node)])
        torch.testing.assert_close(logits[node + 1], expected, **TOLERANCE)


def test_what_a_backend_cannot_do_is_refused_when_the_adapter_is_built() -> None:
    with pytest.raises(BackendError, match="softcapping; use backend=eager"):
        HFAdapter(tiny_model("gemma2"), SDPABackend())


@pytest.mark.parametrize("backend", BACKENDS)
def test_trap_20_poison(backend: str) -> None:
    """A token that a row must not see can change without moving the row's logits by a bit."""
    adapter = HFAdapter(tiny_model("mistral"), BACKENDS[backend]())
    tokens = random_prompt(WINDOW + 4)
    plan = StepPlan(len(tokens), (2,), TREE)
    (before,) = adapter.forward([plan], prefilled(adapter, tokens))
    for poisoned in range(len(TREE)):
        changed = list(TREE.tokens)
        changed[poisoned] += 20
        tree = TokenTree(tuple(changed), TREE.parents)
        (after,) = adapter.forward([StepPlan(len(tokens), (2,), tree)], prefilled(adapter, tokens))
        for node in range(ROOT, len(TREE)):
            if poisoned not in TREE.path(node):
                assert torch.equal(after[node + 1], before[node + 1])
            else:
                assert not torch.equal(after[node + 1], before[node + 1])


@pytest.mark.parametrize("kind", ["mistral", "gpt2", "falcon", "cohere2"])
def test_trap_20_poison_in_a_ragged_batch(kind: str) -> None:
    """To the bit, also for tokens of other sequences; the laws of an adapter allow for noise."""
    check_unseen_tokens(
        Subject(HFAdapter(tiny_model(kind), SDPABackend()), atol=0.0, seed=1, reference=None)
    )


def test_ragged_batch_equals_single_runs() -> None:
    model = tiny_model("mistral")
    adapter = HFAdapter(model, SDPABackend())
    prompts = [random_prompt(1), random_prompt(2 * WINDOW, seed=1), random_prompt(7, seed=2)]
    trees = [TREE, TokenTree(), TokenTree.chain([4, 5])]
    cache = adapter.new_cache(batch=3, capacity=64)
    adapter.forward([StepPlan(0, tuple(prompt)) for prompt in prompts], cache)
    cache.commit([range(len(prompt)) for prompt in prompts])
    assert cache.lengths == (1, 2 * WINDOW, 7)
    plans = [StepPlan(len(prompt), (3,), tree) for prompt, tree in zip(prompts, trees, strict=True)]
    together = adapter.forward(plans, cache)
    for prompt, plan, logits in zip(prompts, plans, together, strict=True):
        assert torch.isfinite(logits).all()
        (alone,) = adapter.forward([plan], prefilled(adapter, prompt, 64))
        torch.testing.assert_close(logits, alone, **TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("path", [(), (0, 1, 3, 6), (4, 5, 7), (0, 2)])
def test_trap_13_keys_and_values_after_acceptance_are_those_of_a_plain_prefill(
    kind: str, path: tuple[int, ...]
) -> None:
    adapter = HFAdapter(tiny_model(kind), SDPABackend())
    prompt = random_prompt(9)
    cache = prefilled(adapter, prompt)
    adapter.forward([StepPlan(9, (6, 2), TREE)], cache)
    cache.commit([[0, 1, *(2 + node for node in path)]])
    tokens = [*prompt, 6, 2, *(TREE.tokens[node] for node in path)]
    assert cache.lengths == (len(tokens),)
    plain = prefilled(adapter, tokens)
    for own, expected in zip(cache.layers, plain.layers, strict=True):
        length = len(tokens)
        torch.testing.assert_close(
            own.keys[:, :, :length], expected.keys[:, :, :length], **TOLERANCE
        )
        torch.testing.assert_close(
            own.values[:, :, :length], expected.values[:, :, :length], **TOLERANCE
        )


def test_cache_memory_is_taken_once_and_kept() -> None:
    adapter = HFAdapter(tiny_model(), SDPABackend())
    cache = prefilled(adapter, random_prompt(10))
    before = [layer.keys.data_ptr() for layer in cache.layers]
    for _ in range(5):
        adapter.forward([StepPlan(cache.lengths[0], (3,), TREE)], cache)
        cache.commit([[0, 5, 6]])
    cache.reset()
    assert cache.lengths == (0,)
    adapter.forward([StepPlan(0, (3,))], cache)
    assert [layer.keys.data_ptr() for layer in cache.layers] == before


def test_a_full_cache_is_an_error_not_an_overflow() -> None:
    adapter = HFAdapter(tiny_model(), SDPABackend())
    cache = prefilled(adapter, random_prompt(10), capacity=12)
    with pytest.raises(GenerationError, match="9 rows do not fit behind 10 in a cache of 12"):
        adapter.forward([StepPlan(10, (3,), TREE)], cache)
    assert cache.lengths == (10,)


def test_plans_must_fit_the_cache() -> None:
    adapter = HFAdapter(tiny_model(), SDPABackend())
    cache = prefilled(adapter, random_prompt(10))
    with pytest.raises(GenerationError, match="do not fit a cache that holds"):
        adapter.forward([StepPlan(4, (3,))], cache)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model()
    before = model.config._attn_implementation
    prompt = torch.tensor([random_prompt(8)])
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    HFAdapter(model, EagerBackend()).forward(
        [StepPlan(0, (1, 2))], HFCache(layers=4, batch=1, capacity=4)
    )
    assert model.config._attn_implementation == before
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)


def test_a_failed_pass_leaves_the_model_as_it_was() -> None:
    model = tiny_model()
    adapter = HFAdapter(model, SDPABackend())
    before = model.config._attn_implementation
    with pytest.raises(IndexError):
        adapter.forward([StepPlan(0, (10**6,))], adapter.new_cache(batch=1, capacity=4))
    assert model.config._attn_implementation == before


def test_threads_share_a_model() -> None:
    model = tiny_model()
    adapters = [HFAdapter(model, EagerBackend()), HFAdapter(model, SDPABackend())]
    plan = StepPlan(0, tuple(random_prompt(20)), TREE)
    (expected,) = adapters[0].forward([plan], adapters[0].new_cache(batch=1, capacity=64))
    failures: list[object] = []

    def work(adapter: HFAdapter) -> None:
        for _ in range(20):
            (logits,) = adapter.forward([plan], adapter.new_cache(batch=1, capacity=64))
            if not torch.allclose(logits, expected, **TOLERANCE):
                failures.append(adapter.backend.name)

    threads = [threading.Thread(target=work, args=(adapters[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_eos_comes_from_the_generation_config_first() -> None:
    with torch.random.fork_rng():
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            eos_token_id=[3, 4],
        )
        model = AutoModelForCausalLM.from_config(config).eval()
    adapter = HFAdapter(model, SDPABackend())
    model.generation_config.eos_token_id = [5, 6]
    assert adapter.eos_token_ids == {5, 6}
    model.generation_config.eos_token_id = None
    assert adapter.eos_token_ids == frozenset(), "as for generate"
    del model.generation_config
    assert adapter.eos_token_ids == {3, 4}
    model.config.eos_token_id = 7
    assert adapter.eos_token_ids == {7}


SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def rope(kind: str) -> LlamaConfig:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    return LlamaConfig(**SMALL, rope_parameters=parameters)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1), "state"),
        (FalconConfig(**SMALL, alibi=True), "cannot be replaced from outside"),
        (rope("dynamic"), "'dynamic' RoPE"),
    ],
)
def test_trap_15_unsupported_models_are_refused_with_the_reason(
    config: object, reason: str
) -> None:
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelSupportError, match=reason) as caught:
        HFAdapter(model, EagerBackend())
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_quantised_cache_is_refused_with_what_to_do() -> None:
    model = own_model()
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(ModelSupportError, match=r"quantised cache.*cache_implementation = None"):
        HFAdapter(model, EagerBackend())
    model.generation_config.cache_implementation = None
    HFAdapter(model, EagerBackend())


def test_a_model_that_fails_with_our_attention_only_is_refused_in_one_line() -> None:
    class Broken(EagerBackend):
        def attend(self, *args: object, **kwargs: object) -> torch.Tensor:
            raise RuntimeError("no\nkernel")

    with pytest.raises(ModelSupportError, match=r"it fails with our attention: .*kernel") as caught:
        HFAdapter(tiny_model(), Broken())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("window", "fits"), [(WINDOW, False), (128, True)])
def test_a_window_that_only_the_masks_know_is_refused_if_it_can_bind(
    window: int, fits: bool
) -> None:
    settings = {**ZOO["phi3"].shape, "sliding_window": window, "num_local_experts": 2}
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(PhimoeConfig(**settings)).eval()
    if fits:  # no text is longer
        HFAdapter(model, EagerBackend())
    else:
        with pytest.raises(ModelSupportError, match=r"masks has 12 .* told of no end"):
            HFAdapter(model, EagerBackend())


def test_other_kinds_of_model_are_refused() -> None:
    with torch.random.fork_rng():
        t5 = T5ForConditionalGeneration(
            T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        )
        headless = LlamaModel(LlamaConfig(**SMALL))
        training = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).train()
    with pytest.raises(ModelSupportError, match="encoder-decoder"):
        HFAdapter(t5.eval(), EagerBackend())
    with pytest.raises(ModelSupportError, match="no language-modelling head"):
        HFAdapter(headless.eval(), EagerBackend())
    with pytest.raises(ModelSupportError, match=r"training mode.*model\.eval"):
        HFAdapter(training, EagerBackend())
