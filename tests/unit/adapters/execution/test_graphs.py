"""Recorded passes: fixed shapes and addresses give the texts of free ones; without a GPU.

The recorder of these tests calls a pass again; CUDA's own is tested by ``tests/gpu``.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import Decoder
from decodekit.adapters.execution import graphs
from decodekit.adapters.execution.graphs import Recordings, check_graphs, rounded_keys
from decodekit.adapters.execution.sizes import rounded_rows
from decodekit.adapters.llama import LlamaAdapter
from decodekit.adapters.llama.recorded_pass import StaticPass
from decodekit.backends.eager import EagerBackend
from decodekit.backends.sdpa import SDPABackend
from decodekit.decoder.build import build_strategy, prepare_execution
from decodekit.errors import ConfigError
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree
from tests.support.executions import REQUESTS, STRATEGIES, Calls
from tests.support.tiny import LLAMA_FAMILY, WINDOW, own_model, random_prompt, tiny_model

TREE = TokenTree(tokens=(5, 9, 7, 7, 3), parents=(ROOT, 0, 0, 1, ROOT))
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # of float32, on logits of the order of 10


def recorded(kind: str = "llama") -> tuple[LlamaAdapter, Calls]:
    adapter, calls = LlamaAdapter(own_model(kind), SDPABackend()), Calls()
    adapter.use_execution("graphs", capture=calls)
    return adapter, calls


def plain(kind: str = "llama") -> LlamaAdapter:
    return LlamaAdapter(own_model(kind), SDPABackend())


def decoder_of(adapter: LlamaAdapter, strategy: Any) -> Decoder:
    return Decoder(adapter, strategy=build_strategy(strategy), prefill_chunk=70)


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_every_strategy_gives_the_tokens_of_free_passes(kind: str, asked: str) -> None:
    free, (fixed, calls) = plain(kind), recorded(kind)
    for length in (1, 2 * WINDOW + 5, 80):
        options = {"max_new_tokens": 40, **REQUESTS[asked]}
        prompt = random_prompt(length)
        expected = decoder_of(free, "autoregressive").generate(prompt, **options).tokens
        for name, strategy in STRATEGIES.items():
            result = decoder_of(fixed, strategy).generate(prompt, **options)
            assert result.tokens == expected, (name, length)
    assert calls.replayed > 5 * calls.recorded


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_ragged_batch_whose_sequences_end_one_by_one(kind: str) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 70, 20)]
    requests = [[*prompt] for prompt in prompts]
    free, (fixed, calls) = plain(kind), recorded(kind)
    stops = {"stop_token_ids": [3, 17]}
    for strategy in STRATEGIES.values():
        expected = [
            decoder_of(free, strategy).generate(prompt, max_new_tokens=40, **stops).tokens
            for prompt in requests
        ]
        results = decoder_of(fixed, strategy).generate(requests, max_new_tokens=40, **stops)
        assert [result.tokens for result in results] == expected
    assert len({len(tokens) for tokens in expected}) > 1
    assert calls.replayed > calls.recorded


@pytest.mark.parametrize("kind", LLAMA_FAMILY)
def test_every_row_has_the_logits_of_a_free_pass_and_the_cache_holds_the_same(kind: str) -> None:
    free, (fixed, _) = plain(kind), recorded(kind)
    caches = [adapter.new_cache(batch=2, capacity=80) for adapter in (free, fixed)]
    plans = [StepPlan(0, tuple(random_prompt(31))), StepPlan(0, (4, 5, 6))]
    for _ in range(4):
        outputs = [
            adapter.forward(plans, cache)
            for adapter, cache in zip((free, fixed), caches, strict=True)
        ]
        for expected, actual in zip(*outputs, strict=True):
            torch.testing.assert_close(actual, expected, **TOLERANCE)
        keep = [
            [*range(len(plan.pending)), *([plan.rows - 1] if plan.tree else [])] for plan in plans
        ]
        for cache in caches:
            cache.commit(keep)
        lengths = caches[0].lengths
        plans = [StepPlan(lengths[0], (1, 2), TREE), StepPlan(lengths[1], (3,))]
    for layer in range(caches[0].layers):
        for expected, actual in zip(caches[0].rows(layer), caches[1].rows(layer), strict=True):
            for index, length in enumerate(lengths):
                torch.testing.assert_close(
                    actual[index, :, :length], expected[index, :, :length], **TOLERANCE
                )


def test_the_result_of_a_pass_is_not_overwritten_by_the_next() -> None:
    adapter, _ = recorded()
    cache = adapter.new_cache(batch=1, capacity=16)
    (first,) = adapter.forward([StepPlan(0, (1, 2, 3))], cache)
    before = first.clone()
    adapter.forward([StepPlan(0, (9, 8, 7))], cache)
    assert torch.equal(first, before)


def test_rows_that_pad_never_touch_rows_that_are_read() -> None:
    """A cache that is full to its last row: what pads goes to the spare one."""
    free, (fixed, _) = plain(), recorded()
    tokens = tuple(random_prompt(13))
    for adapter in (free, fixed):
        cache = adapter.new_cache(batch=1, capacity=16)
        adapter.forward([StepPlan(0, tokens)], cache)
        cache.commit([range(13)])
        (logits,) = adapter.forward([StepPlan(13, (1, 2, 3))], cache)
        cache.commit([range(3)])
        states = cache.rows(0)[0][0, :, :16].clone()
        if adapter is free:
            expected = logits, states
    torch.testing.assert_close(logits, expected[0], **TOLERANCE)
    torch.testing.assert_close(states, expected[1], **TOLERANCE)
    assert fixed.new_cache(batch=1, capacity=16).capacity == 16


def test_a_run_records_few_shapes_and_never_one_twice() -> None:
    adapter, calls = recorded()
    decoder = decoder_of(adapter, STRATEGIES["lookahead"])
    before = calls.recorded
    result = decoder.generate(random_prompt(20), max_new_tokens=100)
    assert len(result.tokens) == 100
    first = calls.recorded - before
    # At most one for each number of rows up to that of a step, and only one size of keys.
    assert 0 < first <= 6
    decoder.generate(random_prompt(20), max_new_tokens=100)
    assert calls.recorded - before == first


def test_a_pass_with_more_rows_than_are_recorded_runs_as_it_is() -> None:
    adapter, calls = recorded()
    before = calls.recorded, calls.replayed
    adapter.forward(
        [StepPlan(0, tuple(random_prompt(65)))], adapter.new_cache(batch=1, capacity=70)
    )
    assert (calls.recorded, calls.replayed) == before


def test_weights_that_are_exchanged_are_recorded_anew() -> None:
    adapter, _ = recorded()
    cache = adapter.new_cache(batch=1, capacity=8)
    plan = StepPlan(0, (1, 2, 3))
    adapter.forward([plan], cache)
    adapter.model.load_state_dict(tiny_model(seed=1).state_dict(), assign=True)
    (logits,) = adapter.forward([plan], cache)
    other = LlamaAdapter(adapter.model, SDPABackend())
    (expected,) = other.forward([plan], other.new_cache(batch=1, capacity=8))
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_a_mask_of_a_longer_pass_leaves_nothing_behind() -> None:
    adapter, _ = recorded()
    cache = adapter.new_cache(batch=1, capacity=40)
    tokens = tuple(random_prompt(32))
    adapter.forward([StepPlan(0, tokens)], cache)
    cache.commit([range(32)])
    adapter.forward([StepPlan(32, (1, 2), TREE)], cache)
    cache.reset()
    (logits,) = adapter.forward([StepPlan(0, (4, 5), TREE)], cache)
    free = plain()
    (expected,) = free.forward([StepPlan(0, (4, 5), TREE)], free.new_cache(batch=1, capacity=8))
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_the_memory_of_a_cache_goes_with_it() -> None:
    class Forgets(Calls):
        """As a real recording, it does not hold what it was made from."""

        def __call__(self, run: Any) -> Any:
            output: Tensor = run()
            return lambda: output

    adapter = plain()
    adapter.use_execution("graphs", capture=Forgets())
    cache = adapter.new_cache(batch=1, capacity=8)
    adapter.forward([StepPlan(0, (1, 2, 3))], cache)
    gone = weakref.ref(cache.rows(0)[0].untyped_storage())
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_sizes() -> None:
    assert [rounded_rows(rows) for rows in (1, 2, 3, 9, 17, 33, 64, 65)] == [
        1, 2, 4, 16, 24, 48, 64, None,
    ]  # fmt: skip
    assert [rounded_keys(keys, 10_000) for keys in (1, 256, 257, 512, 513, 1025)] == [
        256, 256, 512, 512, 1024, 2048,
    ]  # fmt: skip
    assert rounded_keys(300, 301) == 301


def test_recordings_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_RECORDINGS", 2)
    kept: Recordings[int] = Recordings()
    owner = object()
    assert kept.get(owner, "a", lambda: 1) == 1
    assert kept.get(owner, "bb", lambda: 2) == 2
    assert kept.get(owner, "a", lambda: -1) == 1
    assert kept.get(owner, "ccc", lambda: 3) == 3  # in place of "bb", which was used longest ago
    assert kept.get(owner, "a", lambda: -1) == 1
    assert kept.get(owner, "bb", lambda: 5) == 5
    assert kept.get(object(), "bb", lambda: 6) == 6  # other weights
    assert kept.made == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_clear_line() -> None:
    line = r"^execution=graphs needs an NVIDIA GPU with the model on it \(device=cuda\); [^\n]*$"
    with pytest.raises(ConfigError, match=line):
        check_graphs()
    with pytest.raises(ConfigError, match=line):
        Decoder.from_config(execution="graphs", model="smollm2-135m")
    with pytest.raises(ConfigError, match=line):
        Decoder.from_model(tiny_model(), execution="graphs")
    with pytest.raises(ConfigError, match=line):
        plain().use_execution("graphs")


def test_a_model_on_a_cpu_beside_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_graphs()
    with pytest.raises(ConfigError, match="with the model on it"):
        prepare_execution(tiny_model(), "graphs", plain())


def test_only_sdpa_is_recorded() -> None:
    adapter = LlamaAdapter(own_model(), EagerBackend())
    with pytest.raises(ConfigError, match="use backend=sdpa, not eager"):
        adapter.use_execution("graphs", capture=Calls())


def test_a_pass_reads_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would keep what it was given once: all that changes must come in by ``load``."""
    adapter, _ = recorded()
    cache = adapter.new_cache(batch=1, capacity=16)
    made = StaticPass(
        adapter._current().lean, _begun(cache), batch=1, rows=4, keys=rounded_keys(16, 17)
    )
    plans = [StepPlan(0, (1, 2)), StepPlan(0, (7, 8, 9))]
    expected = []
    with torch.inference_mode():
        for plan in plans:
            made.load([plan], [plan.mask()])
            expected.append(made._logits().clone())
            # A kernel may make NaN of a row that sees nothing, and leave it in the spare row.
            assert all((mask == 0).any(-1).all() for mask in made._masks.values())

        def forbidden(*given: Any, **options: Any) -> Any:
            raise AssertionError("a graph cannot record this")

        for name in ("tensor", "arange", "as_tensor"):
            monkeypatch.setattr(torch, name, forbidden)
        for name in ("item", "tolist", "cpu", "__bool__", "__int__"):
            monkeypatch.setattr(Tensor, name, forbidden)
        again = made._logits()
    monkeypatch.undo()
    assert torch.equal(again, expected[1])
    assert not torch.equal(expected[0], expected[1])


def _begun(cache: Any) -> Any:
    cache.begin([1])
    return cache
