"""The weights of the ``llama`` adapter: held once, shared with a model that stays what it was."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from decodekit import Decoder
from decodekit.adapters.execution.fused import fused_linear
from decodekit.adapters.execution.packed import PackedRows, can_pack
from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.llama import LlamaAdapter
from decodekit.adapters.llama import adapter as adapter_module
from decodekit.adapters.llama.forward import LeanForward
from decodekit.backends.sdpa import SDPABackend
from decodekit.decoder.build import _Parts, build_strategy, prepare_execution
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree
from tests.support.tiny import (
    LLAMA_FAMILY,
    greedy_loop,
    logits_after,
    own_model,
    random_prompt,
    tiny_model,
)

TREE = TokenTree(tokens=(5, 9, 7, 7, 3, 11, 5, 8), parents=(ROOT, 0, 0, 1, ROOT, 4, 3, 5))
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # of float32, on logits of the order of 10
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this build of torch cannot pack linear layers"
)


def prefilled(adapter: Any, tokens: list[int], capacity: int = 96) -> Any:
    cache = adapter.new_cache(batch=1, capacity=capacity)
    adapter.forward([StepPlan(0, tuple(tokens))], cache)
    cache.commit([range(len(tokens))])
    return cache


@pytest.fixture
def only_what_is_new() -> Iterator[None]:
    """Hide all objects of earlier tests from ``gc.get_objects``: there may be millions."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def storages() -> Iterator[tuple[int, int]]:
    """Yield the place and size of the storage of every tensor made in the test."""
    gc.collect()
    for thing in gc.get_objects():
        # Exactly these: what a compiler traces with is a tensor without memory.
        plain = type(thing) in (Tensor, nn.Parameter) and thing.layout == torch.strided
        if plain and not thing.is_meta:
            yield thing.untyped_storage().data_ptr(), thing.untyped_storage().nbytes()


def held() -> int:
    """Return the bytes of all tensors made in the test, each storage counted once."""
    return sum(dict(storages()).values())


def sizes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.usefixtures("only_what_is_new")
@pytest.mark.parametrize("kind", ["llama", "llama-biased", "llama-tied"])
def test_weights_are_held_once(kind: str) -> None:
    model = own_model(kind)
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


@pytest.mark.usefixtures("only_what_is_new")
def test_one_group_of_weights_is_held_twice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = own_model("llama-biased")
    mlp = model.model.layers[0].mlp
    largest = 2 * mlp.gate_proj.weight.numel() * 4
    split, seen = torch.split, []

    def watched(*given: Any, **options: Any) -> Any:
        seen.append(held())  # a new tensor is there, and the old ones still are
        return split(*given, **options)

    before = held()
    monkeypatch.setattr(torch, "split", watched)
    lean = LeanForward(model)
    assert len(seen) == 4 * model.config.num_hidden_layers  # weights and biases of two groups
    assert max(seen) - before == largest
    assert lean.windows == {None}
    assert held() == before


@pytest.mark.parametrize("kind", LLAMA_FAMILY)
def test_the_model_stays_what_it_was(kind: str, tmp_path: Any) -> None:
    model = own_model(kind)
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
    model, other = own_model(), copy.deepcopy(tiny_model(seed=1))
    adapter = LlamaAdapter(model, SDPABackend())
    prefilled(adapter, [1, 2, 3])
    for assign in (False, True):
        source = copy.deepcopy((other if not assign else tiny_model()).state_dict())
        model.load_state_dict(source, assign=assign)
        (logits,) = adapter.forward(
            [StepPlan(0, (1, 2, 3))], adapter.new_cache(batch=1, capacity=4)
        )
        torch.testing.assert_close(logits[0], logits_after(model, [1, 2, 3]), **TOLERANCE)


def test_a_larger_vocabulary_is_read_anew() -> None:
    model = own_model()
    adapter = LlamaAdapter(model, SDPABackend())
    prefilled(adapter, [1, 2, 3])
    model.resize_token_embeddings(70, mean_resizing=False)
    prompt = [1, 69, 3]
    (logits,) = adapter.forward([StepPlan(0, (1, 69, 3))], adapter.new_cache(batch=1, capacity=4))
    assert logits.shape == (1, adapter.vocab_size) == (1, 70)
    torch.testing.assert_close(logits[0], logits_after(model, prompt), **TOLERANCE)


def test_threads_share_a_model_that_nobody_has_fused_yet() -> None:
    model = own_model("llama-biased")
    plan = StepPlan(0, tuple(random_prompt(20)), TREE)
    plain = HFAdapter(own_model("llama-biased"), SDPABackend())
    (expected,) = plain.forward([plan], plain.new_cache(batch=1, capacity=64))
    wrong: list[object] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for capacity in (64, 700, 65):
            adapter = LlamaAdapter(model, SDPABackend())
            (logits,) = adapter.forward([plan], adapter.new_cache(batch=1, capacity=capacity))
            if not torch.allclose(logits, expected, **TOLERANCE):
                wrong.append(logits)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert fused_linear([model.model.layers[1].mlp.gate_proj, model.model.layers[1].mlp.up_proj])


def test_a_model_that_was_cast_is_read_anew() -> None:
    model = own_model()
    adapter = LlamaAdapter(model, SDPABackend())
    prefilled(adapter, [1, 2, 3])
    model.double()
    (logits,) = adapter.forward([StepPlan(0, (1, 2, 3))], adapter.new_cache(batch=1, capacity=4))
    torch.testing.assert_close(logits[0], logits_after(model, [1, 2, 3]), atol=1e-9, rtol=1e-9)


# --- packed weights ------------------------------------------------------------------------------


@pytest.mark.usefixtures("only_what_is_new")
@needs_packing
@pytest.mark.parametrize("kind", ["llama", "llama-biased", "qwen2"])
def test_packing_takes_the_fused_layers_and_lets_the_weights_go(kind: str) -> None:
    model = own_model(kind)
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
    model = own_model()
    adapter = LlamaAdapter(model, SDPABackend())
    plan = StepPlan(0, (1, 2, 3), TREE)
    (before,) = adapter.forward([plan], adapter.new_cache(batch=1, capacity=16))
    Decoder.from_model(model, execution="packed")
    (after,) = adapter.forward([plan], adapter.new_cache(batch=1, capacity=16))
    torch.testing.assert_close(after, before, **TOLERANCE)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert all(part.packed for part in adapter._current().lean.layers[0].qkv)


@needs_packing
def test_a_pass_is_laid_out_before_or_after_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle, the plain weights would be held beside the packed ones for ever."""
    model = own_model()
    adapter = LlamaAdapter(model, SDPABackend())
    packing = threading.Thread(target=prepare_execution, args=(model, "packed"))

    class Slow(LeanForward):
        def __init__(self, model: Any) -> None:
            if packing.ident is None:
                packing.start()
                packing.join(0.3)
                assert packing.is_alive()  # it has to wait for us
            super().__init__(model)

    monkeypatch.setattr(adapter_module, "LeanForward", Slow)
    prefilled(adapter, [1, 2, 3])
    packing.join()
    assert adapter._current().lean.layers[0].qkv[0].packed


@needs_packing
def test_threads_pack_and_run_one_model() -> None:
    prompt = random_prompt(12)
    expected = greedy_loop(tiny_model(), prompt, 6)
    settings = [{"execution": "packed"}, {"adapter": "llama"}, {"adapter": "hf"}, {}]
    for _ in range(6):
        model = own_model()
        start = threading.Barrier(2 * len(settings))
        texts: list[list[int]] = []

        def work(index: int, model: Any = model, start: Any = start, texts: Any = texts) -> None:
            start.wait()
            decoder = Decoder.from_model(model, **{"execution": "auto", **settings[index % 4]})
            texts.append(decoder.generate(prompt, max_new_tokens=6).tokens)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [expected] * 8


@needs_packing
def test_a_model_that_was_packed_before_anybody_fused_it() -> None:
    model = own_model("llama-biased")
    expected = greedy_loop(model, random_prompt(12), 20)
    Decoder.from_model(model, adapter="hf", execution="packed")
    decoder = Decoder.from_model(model, adapter="llama")
    assert decoder.generate(random_prompt(12), max_new_tokens=20).tokens == expected


@needs_packing
def test_a_draft_is_fused_before_it_is_packed(checkpoint: str) -> None:
    like = LlamaAdapter(own_model(), SDPABackend())
    adapter, _ = _Parts().load_model(checkpoint, backend="sdpa", like=like)
    assert isinstance(adapter.model.model.layers[0].self_attn.q_proj, PackedRows)
