"""``execution=compiled``: the same tokens, few compilations, and none of them hidden."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from decodekit import Decoder
from decodekit.adapters.execution import compiled
from decodekit.adapters.execution.compiled import ROWS, CompiledRows
from decodekit.adapters.execution.onednn import packed_linear
from decodekit.adapters.execution.packed import PackedLinear, can_pack
from decodekit.adapters.llama import LlamaAdapter
from decodekit.adapters.llama.layer import between_attentions
from decodekit.backends.eager import EagerBackend
from decodekit.backends.sdpa import SDPABackend
from decodekit.decoder.build import build_strategy, prepare_execution
from decodekit.errors import ConfigError
from decodekit.interfaces import Compilation
from decodekit.interfaces.plan import StepPlan
from tests.support.executions import REQUESTS, STRATEGIES
from tests.support.tiny import own_model, random_prompt

needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this build of torch cannot pack linear layers"
)

SIZES = (1, 24)


def deep_model() -> LlamaForCausalLM:
    """Return a model of six layers, in which five places are compiled."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.4,
            eos_token_id=None,
            pad_token_id=None,
        )
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", autouse=True)
def sizes() -> Iterator[None]:
    """Compile for few sizes: each takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "ROWS", SIZES)
        yield


@pytest.fixture(scope="module", params=["packed", "plain"])
def pair(request: pytest.FixtureRequest, sizes: None) -> tuple[LlamaAdapter, LlamaAdapter]:
    """Return one model under two adapters: as it is, and compiled."""
    if request.param == "packed" and not can_pack(torch.float32):
        pytest.skip("this build of torch cannot pack linear layers")
    model = deep_model()
    if request.param == "packed":
        prepare_execution(model, "packed")
    free = LlamaAdapter(copy.deepcopy(model) if request.param == "plain" else model, SDPABackend())
    fast = LlamaAdapter(model, SDPABackend())
    fast.use_execution("compiled")
    return free, fast


def decoder_of(adapter: LlamaAdapter, strategy: Any) -> Decoder:
    return Decoder(adapter, strategy=build_strategy(strategy), prefill_chunk=70)


@pytest.mark.parametrize("asked", REQUESTS)
def test_every_strategy_gives_the_tokens_of_eager(
    pair: tuple[LlamaAdapter, LlamaAdapter], asked: str
) -> None:
    free, fast = pair
    for length in (1, 30, 150):  # longer than the most rows that are compiled for
        options = {"max_new_tokens": 40, **REQUESTS[asked]}
        prompt = random_prompt(length)
        expected = decoder_of(free, "autoregressive").generate(prompt, **options).tokens
        for name, strategy in STRATEGIES.items():
            result = decoder_of(fast, strategy).generate(prompt, **options)
            assert result.tokens == expected, (name, length)


def test_a_ragged_batch(pair: tuple[LlamaAdapter, LlamaAdapter]) -> None:
    free, fast = pair
    prompts = [random_prompt(length, seed=length) for length in (1, 40, 9)]
    for strategy in STRATEGIES.values():
        expected = [
            decoder_of(free, strategy).generate(prompt, max_new_tokens=30).tokens
            for prompt in prompts
        ]
        results = decoder_of(fast, strategy).generate(prompts, max_new_tokens=30)
        assert [result.tokens for result in results] == expected


def test_one_size_is_compiled_once_for_all_layers_lengths_batches_and_decoders(
    pair: tuple[LlamaAdapter, LlamaAdapter],
) -> None:
    """Counted by torch itself, which must agree with what we report."""
    _, fast = pair
    decoder = decoder_of(fast, STRATEGIES["lookahead"])
    graphs, count = counters["stats"]["unique_graphs"], fast.compilation.count
    result = decoder.generate(random_prompt(20), max_new_tokens=200)
    assert len(result.tokens) == 200
    decoder.generate([random_prompt(70), random_prompt(3)], max_new_tokens=50)
    made = counters["stats"]["unique_graphs"] - graphs
    assert made == fast.compilation.count - count
    assert fast.compilation.count <= len(SIZES)
    settled = counters["stats"]["unique_graphs"]
    decoder.generate(random_prompt(20), max_new_tokens=200)
    other = LlamaAdapter(fast.model, EagerBackend())
    other.use_execution("compiled")
    decoder_of(other, STRATEGIES["lookahead"]).generate(random_prompt(20), max_new_tokens=50)
    assert counters["stats"]["unique_graphs"] == settled
    assert other.compilation == Compilation(0, 0.0)


def test_what_was_compiled_is_run(
    pair: tuple[LlamaAdapter, LlamaAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the tests above against a pass that goes around the compiled code."""
    _, fast = pair
    asked: list[tuple[int, int]] = []
    real = CompiledRows.for_rows

    def watched(self: CompiledRows, rows: int) -> Any:
        padding, function = real(self, rows)
        asked.append((rows, padding))
        assert (function is between_attentions) == (rows > max(SIZES))
        return padding, function

    monkeypatch.setattr(CompiledRows, "for_rows", watched)
    decoder_of(fast, "autoregressive").generate(random_prompt(143), max_new_tokens=3)
    assert asked == [(70, 0), (70, 0), (3, 21), (1, 0), (1, 0)]


@needs_packing
def test_it_packs_on_a_cpu_and_the_decoder_says_what_it_cost() -> None:
    torch._dynamo.reset()  # what another test compiled in this process would be used
    model = own_model()
    decoder = Decoder.from_model(model, adapter="llama", execution="compiled")
    assert isinstance(model.lm_head, PackedLinear)
    assert decoder.execution == "compiled"
    cost = decoder.compilation
    assert cost is not None
    assert cost.count >= 1
    assert cost.seconds > 0
    other = decoder.with_strategy("autoregressive")
    assert (other.execution, other.compilation) == ("compiled", cost)
    eager = Decoder.from_model(own_model(), adapter="llama")
    assert (eager.execution, eager.compilation) == ("eager", None)


def test_windows_and_other_dtypes() -> None:
    """In float64, which cannot be packed."""
    model = own_model("mistral", torch.float64)
    expected = Decoder.from_model(
        copy.deepcopy(model), adapter="hf", strategy="autoregressive"
    ).generate(random_prompt(50), max_new_tokens=40)
    decoder = Decoder.from_model(
        model, adapter="llama", execution="compiled", strategy=STRATEGIES["lookahead"]
    )
    result = decoder.generate(random_prompt(50), max_new_tokens=40)
    assert result.tokens == expected.tokens
    assert decoder.compilation is not None
    assert 1 < decoder.compilation.count <= len(SIZES)


def test_another_adapter_is_refused_before_its_model_is_changed() -> None:
    model = own_model("gpt2")
    reason = "needs adapter=llama, which cannot run this model: its class is none of .*; use"
    with pytest.raises(ConfigError, match=f"execution=compiled {reason} execution=auto"):
        Decoder.from_model(model, execution="compiled")
    llama = own_model()
    with pytest.raises(ConfigError, match=r"needs adapter=llama \(the LLaMA family\), not hf; use"):
        Decoder.from_model(llama, adapter="hf", execution="compiled")
    assert not any(isinstance(module, PackedLinear) for module in llama.modules())


def test_what_cannot_be_compiled_is_refused_when_the_decoder_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    compiled._compiled.cache_clear()
    monkeypatch.setattr(torch._dynamo, "lookup_backend", {"inductor": broken}.get)
    adapter = LlamaAdapter(own_model(), SDPABackend())
    try:
        with pytest.raises(
            ConfigError, match=r"here \(.*no C\+\+ compiler.*\); use execution=eager"
        ):
            adapter.use_execution("compiled")
    finally:
        compiled._compiled.cache_clear()


@pytest.mark.parametrize(
    ("mode", "expected"), [("auto", "packed"), ("eager", "eager"), ("packed", "packed")]
)
@needs_packing
def test_the_decoder_says_which_execution_was_picked(mode: str, expected: str) -> None:
    decoder = Decoder.from_model(own_model(), execution=mode)
    assert decoder.execution == decoder.with_strategy("jacobi").execution == expected
    assert Decoder.from_model(own_model(dtype=torch.float64), execution="auto").execution == "eager"


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_weight_as_an_argument_of_compiled_code(bias: bool) -> None:
    """The operator behind it, alone: one compilation serves two layers."""
    layers = [PackedLinear(torch.nn.Linear(16, 24, bias=bias)) for _ in range(2)]
    function = torch.compile(packed_linear, fullgraph=True, dynamic=False, backend="eager")
    states = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        for layer in layers:
            output = function(states, layer.packed, layer.plain_bias, 24)
            torch.testing.assert_close(output, layer(states))
    assert counters["stats"]["unique_graphs"] - before == 1


def test_a_batch_step_in_one_size_of_rows_is_padded_and_right() -> None:
    """12 rows in one pass, of sequences that lie between others."""
    free, fast = (LlamaAdapter(own_model(), SDPABackend()) for _ in range(2))
    fast.use_execution("compiled")
    plans = [StepPlan(0, tuple(random_prompt(4, seed=seed))) for seed in (1, 2, 3)]
    outputs = [
        adapter.forward(plans, adapter.new_cache(batch=3, capacity=16)) for adapter in (free, fast)
    ]
    for expected, actual in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


def test_a_second_start_takes_the_code_from_torchs_cache() -> None:
    """Counted by torch: what is compiled a second time is found by its contents, on disk."""
    found = counters["inductor"]
    for expected in (None, 1):
        torch._dynamo.reset()  # as a new process: all that is left is on disk
        compiled._compiled.cache_clear()
        hits, misses = found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
        adapter = LlamaAdapter(own_model(), SDPABackend())
        adapter.use_execution("compiled")
        assert adapter.compilation is not None
        assert adapter.compilation.count == 1
        hits, misses = found["fxgraph_cache_hit"] - hits, found["fxgraph_cache_miss"] - misses
        assert hits + misses == 1
        assert expected is None or hits == expected


def test_sizes_are_few_and_a_longer_pass_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROWS", ROWS)
    rows = CompiledRows(between_attentions)
    assert [rows.for_rows(count)[0] for count in (1, 2, 3, 5, 17, 33, 64)] == [0, 0, 1, 3, 7, 15, 0]
    assert rows.for_rows(65) == (0, between_attentions)
    assert rows.for_rows(64)[1] is not between_attentions
