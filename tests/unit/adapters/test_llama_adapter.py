"""The ``llama`` adapter: the logits of the ``hf`` adapter, from weights that are held once."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from decodekit import Decoder
from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.llama import LlamaAdapter, obstacle
from decodekit.adapters.llama.cache import LlamaCache
from decodekit.adapters.llama.forward import LeanForward
from decodekit.adapters.llama.rope import RotaryTable
from decodekit.backends.eager import EagerBackend
from decodekit.backends.sdpa import SDPABackend
from decodekit.errors import GenerationError, ModelSupportError
from decodekit.execution.fused import fused_linear
from decodekit.execution.packed import PackedRows, can_pack
from decodekit.factory import _Parts, build_adapter, build_strategy, prepare_execution
from decodekit.plan import StepPlan
from decodekit.tree import ROOT, TokenTree
from tests.tiny import LLAMA_FAMILY, WINDOW, greedy_loop, logits_after, random_prompt, tiny_model

TREE = TokenTree(tokens=(5, 9, 7, 7, 3, 11, 5, 8), parents=(ROOT, 0, 0, 1, ROOT, 4, 3, 5))
BACKENDS = {"eager": EagerBackend, "sdpa": SDPABackend}
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    # On logits of the order of 10. The norms are in float32 under float64 too, as in transformers.
    torch.float32: {"atol": 1e-4, "rtol": 1e-5},
    torch.float64: {"atol": 1e-9, "rtol": 1e-9},
}
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this build of torch cannot pack linear layers"
)


def own(kind: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny model that a test may change."""
    return copy.deepcopy(tiny_model(kind, dtype=dtype))


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
    model = own(kind, dtype)
    adapters = [HFAdapter(own(kind, dtype), BACKENDS[backend]()), None]
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
    plain, adapter = tiny_model(kind), LlamaAdapter(own(kind), SDPABackend())
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
    adapter = LlamaAdapter(own(kind), BACKENDS[backend]())
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
    adapter = LlamaAdapter(own(), SDPABackend())
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
    config = LlamaConfig(**SMALL, max_position_embeddings=4096)
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
    adapter = LlamaAdapter(own(), SDPABackend())
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
    adapter = LlamaAdapter(own(), SDPABackend())
    cache = prefilled(adapter, random_prompt(10), capacity=12)
    with pytest.raises(GenerationError, match="9 rows do not fit behind 10 in a cache of 12"):
        adapter.forward([StepPlan(10, (3,), TREE)], cache)
    with pytest.raises(GenerationError, match="do not fit a cache that holds"):
        adapter.forward([StepPlan(4, (3,))], cache)
    foreign = HFAdapter(own(), SDPABackend()).new_cache(batch=1, capacity=4)
    with pytest.raises(GenerationError, match="cannot use a HFCache"):
        adapter.forward([StepPlan(0, (3,))], foreign)
    assert isinstance(cache, LlamaCache)
    assert cache.lengths == (10,)


# --- the model and its memory --------------------------------------------------------------------


def storages() -> Iterator[tuple[int, int]]:
    """Yield the place and size of the storage of every tensor in this process."""
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout == torch.strided and not thing.is_meta:
            yield thing.untyped_storage().data_ptr(), thing.untyped_storage().nbytes()


def held() -> int:
    """Return the bytes of all tensors in this process, each storage counted once."""
    return sum(dict(storages()).values())


def sizes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "llama-biased", "llama-tied"])
def test_weights_are_held_once(kind: str) -> None:
    model = own(kind)
    before, weights = held(), sizes(model)
    adapters = [LlamaAdapter(model, SDPABackend()) for _ in range(3)]
    assert held() == before
    for adapter in adapters:
        prefilled(adapter, [1, 2, 3], capacity=4)
    # Cosines and sines of 256 positions for each adapter, and nothing besides.
    assert held() - before == 3 * 256 * 2 * 8 * 4
    kept = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()
    }
    assert sum(kept.values()) == sizes(model) == weights


def test_one_group_of_weights_is_held_twice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = own("llama-biased")
    mlp = model.model.layers[0].mlp
    largest = 2 * mlp.gate_proj.weight.numel() * 4
    split, seen = torch.split, []

    def watched(*given: Any, **options: Any) -> Any:
        seen.append(held())  # a new tensor is there, and the old ones still are
        return split(*given, **options)

    before = held()
    monkeypatch.setattr(torch, "split", watched)
    lean = LeanForward(model)
    assert len(seen) == 8  # weights and biases of two groups in each of two layers
    assert max(seen) - before == largest
    assert lean.windows == {None}
    assert held() == before


@pytest.mark.parametrize("kind", LLAMA_FAMILY)
def test_the_model_stays_what_it_was(kind: str, tmp_path: Any) -> None:
    model = own(kind)
    prompt = torch.tensor([random_prompt(8)])
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False)
    state = copy.deepcopy(model.state_dict())
    parameters = [id(parameter) for parameter in model.parameters()]
    LlamaAdapter(model, SDPABackend())
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=False), expected)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again.generate(prompt, max_new_tokens=9, do_sample=False), expected)


def test_new_values_in_the_old_weights_are_seen() -> None:
    model, other = own(), copy.deepcopy(tiny_model(seed=1))
    adapter = LlamaAdapter(model, SDPABackend())
    prefilled(adapter, [1, 2, 3])
    for assign in (False, True):
        source = copy.deepcopy((other if not assign else tiny_model()).state_dict())
        model.load_state_dict(source, assign=assign)
        (logits,) = adapter.forward(
            [StepPlan(0, (1, 2, 3))], adapter.new_cache(batch=1, capacity=4)
        )
        torch.testing.assert_close(
            logits[0], logits_after(model, [1, 2, 3]), **TOLERANCES[torch.float32]
        )


def test_threads_share_a_model_that_nobody_has_fused_yet() -> None:
    model = own("llama-biased")
    plan = StepPlan(0, tuple(random_prompt(20)), TREE)
    plain = HFAdapter(own("llama-biased"), SDPABackend())
    (expected,) = plain.forward([plan], plain.new_cache(batch=1, capacity=64))
    wrong: list[object] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for capacity in (64, 700, 65):
            adapter = LlamaAdapter(model, SDPABackend())
            (logits,) = adapter.forward([plan], adapter.new_cache(batch=1, capacity=capacity))
            if not torch.allclose(logits, expected, **TOLERANCES[torch.float32]):
                wrong.append(logits)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert fused_linear([model.model.layers[1].mlp.gate_proj, model.model.layers[1].mlp.up_proj])


def test_a_model_that_was_cast_is_read_anew() -> None:
    model = own()
    adapter = LlamaAdapter(model, SDPABackend())
    prefilled(adapter, [1, 2, 3])
    model.double()
    (logits,) = adapter.forward([StepPlan(0, (1, 2, 3))], adapter.new_cache(batch=1, capacity=4))
    torch.testing.assert_close(
        logits[0], logits_after(model, [1, 2, 3]), **TOLERANCES[torch.float64]
    )


# --- packed weights ------------------------------------------------------------------------------


@needs_packing
@pytest.mark.parametrize("kind", ["llama", "llama-biased", "qwen2"])
def test_packing_takes_the_fused_layers_and_lets_the_weights_go(kind: str) -> None:
    model = own(kind)
    expected = greedy_loop(model, random_prompt(12), 20)
    adapter = LlamaAdapter(model, SDPABackend())
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    gone = [weakref.ref(module) for module in linears]
    # Biases are kept as they are; packed weights have no storage that Python sees.
    weights = sum(module.weight.numel() * 4 for module in linears)
    del linears
    before = held()
    prepare_execution(model, "packed")
    assert before - held() == weights
    assert all(reference() is None for reference in gone)
    for decoder in (
        Decoder(adapter, strategy=build_strategy("lookahead")),
        Decoder.from_model(model, adapter="llama"),
        Decoder.from_model(model, adapter="hf"),
        Decoder.from_model(model, adapter="llama", execution="packed"),
    ):
        assert decoder.generate(random_prompt(12), max_new_tokens=20).tokens == expected
    assert greedy_loop(model, random_prompt(12), 20) == expected


@needs_packing
def test_an_adapter_in_use_notices_that_its_model_was_packed() -> None:
    model = own()
    adapter = LlamaAdapter(model, SDPABackend())
    plan = StepPlan(0, (1, 2, 3), TREE)
    (before,) = adapter.forward([plan], adapter.new_cache(batch=1, capacity=16))
    Decoder.from_model(model, execution="packed")
    (after,) = adapter.forward([plan], adapter.new_cache(batch=1, capacity=16))
    torch.testing.assert_close(after, before, **TOLERANCES[torch.float32])
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert "partial" not in type(adapter._current()._layers[0].qkv).__name__


@needs_packing
def test_a_model_that_was_packed_before_anybody_fused_it() -> None:
    model = own("llama-biased")
    expected = greedy_loop(model, random_prompt(12), 20)
    Decoder.from_model(model, adapter="hf", execution="packed")
    decoder = Decoder.from_model(model, adapter="llama")
    assert decoder.generate(random_prompt(12), max_new_tokens=20).tokens == expected


@needs_packing
def test_a_draft_is_fused_before_it_is_packed(checkpoint: str) -> None:
    like = LlamaAdapter(own(), SDPABackend())
    adapter, _ = _Parts().load_model(checkpoint, backend="sdpa", like=like)
    assert isinstance(adapter.model.model.layers[0].self_attn.q_proj, PackedRows)


# --- what is refused -----------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class _Adapted(nn.Module):
    """What LoRA makes of a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states)


def _adapted(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.v_proj = _Adapted(attention.v_proj)


def _nothing(*given: Any) -> None:
    """A hook that changes nothing."""


def _hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(_nothing)


def _pre_hooked(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(_nothing)


def _patched(model: Any) -> None:
    model.model.norm.forward = lambda states: states


def _mixed(model: Any) -> None:
    model.lm_head.double()


def _elsewhere(model: Any) -> None:
    model.lm_head.to("meta")


def _nowhere(model: Any) -> None:
    model.to("meta")


def _eighths(model: Any) -> None:
    model.to(torch.float8_e4m3fn)


def _scaled(model: Any) -> None:
    model.model.rotary_emb.rope_type = "dynamic"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.train(), r"training mode.*call model\.eval\(\)"),
        (_adapted, r"its model\.layers\.1\.self_attn\.v_proj is a _Adapted \(quantised, adapted"),
        (_hooked, r"its model\.layers\.0\.mlp has a hook, which would be skipped"),
        (_pre_hooked, r"its model\.layers\.0\.mlp\.down_proj has a hook"),
        (_patched, r"the forward of its model\.norm was replaced"),
        (_mixed, r"several dtypes: torch\.float32, torch\.float64"),
        (_elsewhere, "spread over cpu, meta"),
        (_nowhere, "on the meta device"),
        (_eighths, r"weights are of torch\.float8_e4m3fn"),
        (_scaled, "its 'dynamic' RoPE is none of default, linear, llama3, yarn"),
    ],
    ids=[
        "training",
        "adapted",
        "hooked",
        "pre-hooked",
        "patched",
        "mixed",
        "elsewhere",
        "nowhere",
        "eighths",
        "scaled",
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: Any, reason: str) -> None:
    model = own()
    assert obstacle(model) is None
    change(model)
    with pytest.raises(ModelSupportError, match=reason) as caught:
        LlamaAdapter(model, EagerBackend())
    assert str(caught.value).startswith("LlamaForCausalLM cannot be decoded by the 'llama' adapter")
    assert "\n" not in str(caught.value)


def test_other_classes_are_refused() -> None:
    class Mine(type(tiny_model())):  # type: ignore[misc]
        pass

    mine = Mine(tiny_model().config).eval()
    for model in (mine, tiny_model("gemma2"), tiny_model("gpt2")):
        with pytest.raises(ModelSupportError, match="its class is none of LlamaForCausalLM, Mist"):
            LlamaAdapter(model, EagerBackend())


def test_collecting_hidden_states_once_does_not_count_as_a_hook() -> None:
    model = own()
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert obstacle(model) is None


@pytest.mark.parametrize("kind", [*LLAMA_FAMILY, "gpt2", "gemma2"])
def test_auto_picks_llama_where_it_fits_and_says_so(kind: str) -> None:
    decoder = Decoder.from_model(own(kind), backend="eager")
    assert decoder.adapter_name == ("llama" if kind in LLAMA_FAMILY else "hf")
    changed = own(kind)
    changed.register_forward_hook(_nothing)
    assert build_adapter(changed, backend="eager").name == "hf"
