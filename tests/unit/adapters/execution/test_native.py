"""``execution=native``: what the model says, and a row's bits whatever runs beside it."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from decodekit import Decoder
from decodekit.adapters.execution.native.library import native_library
from decodekit.adapters.execution.packed import can_pack
from decodekit.adapters.llama import LlamaAdapter
from decodekit.decoder.build import build_adapter, build_strategy, prepare_execution
from decodekit.errors import ConfigError, GenerationError
from decodekit.interfaces import KVCache
from decodekit.interfaces.plan import StepPlan
from decodekit.testing import check_adapter
from decodekit.testing.laws import random_tree
from tests.support.executions import REQUESTS, STRATEGIES
from tests.support.native import CONFIGS, alone_by, native_adapter, native_model, needs_compiler
from tests.support.tiny import logits_after, own_model

pytestmark = needs_compiler

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (1, 5, 127, 128, 129, 300)  # keys are taken 128 at a time


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    choose = random.Random(seed)
    return tuple(choose.randrange(64) for _ in range(length))


def nothing(*given: Any) -> None:
    """A hook that changes nothing."""


def prefilled(adapter: LlamaAdapter, prompt: Sequence[int], *, room: int = 64) -> KVCache:
    cache = adapter.new_cache(batch=1, capacity=len(prompt) + room)
    adapter.forward([StepPlan(0, tuple(prompt))], cache)
    cache.commit([range(len(prompt))])
    return cache


def alone(adapter: LlamaAdapter, text: Sequence[int]) -> Tensor:
    """Return the logits [V] after ``text``, of which each token had a pass of its own."""
    cache = adapter.new_cache(batch=1, capacity=len(text))
    for place, token in enumerate(text):
        (logits,) = adapter.forward([StepPlan(place, (token,))], cache)
        cache.commit([[0]])
    return logits[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_an_adapter_like_any_other(kind: str) -> None:
    adapter = native_adapter(kind)
    model = adapter.model
    check_adapter(adapter, reference=lambda tokens: logits_after(model, tokens), atol=5e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_laws_hold_to_the_last_bit(kind: str, dtype: torch.dtype) -> None:
    """Trees, chunks, batches, commits: against one sequence and one chain at a time."""
    adapter = native_adapter(kind, dtype)
    check_adapter(adapter, reference=alone_by(adapter), atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_node_has_the_bits_of_its_path_token_by_token(
    length: int, kind: str, dtype: torch.dtype
) -> None:
    adapter, prompt = native_adapter(kind, dtype), tokens_of(length)
    tree = random_tree(random.Random(length), 30, 64, depth=9)
    cache = prefilled(adapter, prompt)
    (logits,) = adapter.forward([StepPlan(length, (3,), tree)], cache)
    for node in range(0, len(tree), 7):
        text = (*prompt, 3, *tree.path_tokens(node))
        assert torch.equal(logits[1 + node], alone(adapter, text))


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_threads_nor_chunks_change_a_bit(dtype: torch.dtype) -> None:
    adapter, prompt = native_adapter("llama", dtype), tokens_of(150)
    plan = StepPlan(0, prompt, random_tree(random.Random(1), 20, 64, depth=5))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(adapter.forward([plan], adapter.new_cache(batch=1, capacity=170))[0])
    finally:
        torch.set_num_threads(threads)
    cache = adapter.new_cache(batch=1, capacity=170)
    for start in range(0, 140, 35):
        adapter.forward([StepPlan(start, prompt[start : start + 35])], cache)
        cache.commit([range(35)])
    found.append(adapter.forward([StepPlan(140, prompt[140:], plan.tree)], cache)[0])
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_more_partial_results_than_are_held_at_once(kind: str) -> None:
    """A row has one for each head and 128 keys: 900 rows behind 3,000 tokens fill over 16 MiB."""
    adapter, text = native_adapter(kind), tokens_of(3900)
    found = []
    for chunks in ((3000, 900), (300,) * 13):
        cache, start = adapter.new_cache(batch=1, capacity=3900), 0
        for chunk in chunks:
            (logits,) = adapter.forward([StepPlan(start, text[start : start + chunk])], cache)
            cache.commit([range(chunk)])
            start += chunk
        found.append(logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_transformers(kind: str) -> None:
    adapter, prompt = native_adapter(kind), tokens_of(200)
    (logits,) = adapter.forward([StepPlan(0, prompt)], adapter.new_cache(batch=1, capacity=200))
    expected = logits_after(native_model(kind), prompt)
    torch.testing.assert_close(logits[0], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_bfloat16_is_nearer_to_float32_than_transformers_is(kind: str) -> None:
    """Hidden states, norms and attention are float32 in between, so less is rounded."""
    adapter = native_adapter(kind, torch.bfloat16)
    exact = native_model(kind, torch.bfloat16).float()  # the same weights
    ours, theirs = [], []
    for seed in range(8):
        prompt = tokens_of(40, seed)
        (logits,) = adapter.forward([StepPlan(0, prompt)], adapter.new_cache(batch=1, capacity=40))
        expected = logits_after(exact, prompt)
        ours.append((logits[0].float() - expected).square().mean())
        theirs.append((logits_after(adapter.model, prompt).float() - expected).square().mean())
    assert sum(ours) < sum(theirs)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_are_nearly_alike_and_far_apart(dtype: torch.dtype, scale: float) -> None:
    model = native_model("llama", dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(scale)
    adapter = build_adapter(model, adapter="llama")
    adapter.use_execution("native")
    prompts = [tokens_of(140, seed) for seed in range(8)]
    ours = [
        adapter.forward([StepPlan(0, prompt)], adapter.new_cache(batch=1, capacity=140))[0][0]
        for prompt in prompts
    ]
    theirs = [logits_after(model, prompt) for prompt in prompts]
    model.double()
    exact = torch.stack([logits_after(model, prompt) for prompt in prompts])
    error = (torch.stack(ours) - exact).square().mean().sqrt()
    # In bfloat16 far scores make every rounding count: not to be further off than transformers.
    allowed = (torch.stack(theirs) - exact).square().mean().sqrt()
    assert error < (1e-4 if dtype == torch.float32 else 1.1 * allowed)


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_strategy_writes_the_same_tokens(dtype: torch.dtype, asked: str) -> None:
    adapter = native_adapter("llama", dtype)
    prompts = [list(tokens_of(length, length)) for length in (3, 40, 130)]
    options = {"max_new_tokens": 40, **REQUESTS[asked]}

    def texts(strategy: Any) -> list[list[int]]:
        decoder = Decoder(adapter, strategy=build_strategy(strategy), prefill_chunk=50)
        single = [decoder.generate(prompt, **options).tokens for prompt in prompts]
        together = decoder.generate(prompts, **options)
        assert [result.tokens for result in together] == single
        return single

    expected = texts("autoregressive")
    for strategy in STRATEGIES.values():
        assert texts(strategy) == expected


def test_the_weights_are_those_of_the_model_and_are_read_where_they_are() -> None:
    model = native_model()
    decoder = Decoder.from_model(model, execution="native", strategy="autoregressive")
    prompt = list(tokens_of(9))
    decoder.generate(prompt, max_new_tokens=2)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
        model.model.layers[0].self_attn.v_proj.weight.mul_(-2)
        model.lm_head.weight.mul_(-1)
    adapter = decoder.adapter
    (logits,) = adapter.forward(
        [StepPlan(0, tuple(prompt))], adapter.new_cache(batch=1, capacity=9)
    )
    expected = logits_after(model, prompt)
    torch.testing.assert_close(logits[0], expected, atol=2e-4, rtol=1e-4)


def test_a_model_that_is_changed_into_one_without_kernels_runs_on() -> None:
    model = native_model()
    decoder = Decoder.from_model(model, execution="native")
    prompt = list(tokens_of(9))
    decoder.generate(prompt, max_new_tokens=2)
    model.double()
    assert (
        decoder.generate(prompt, max_new_tokens=9).tokens
        == Decoder.from_model(native_model().double()).generate(prompt, max_new_tokens=9).tokens
    )


def test_a_token_that_is_none() -> None:
    adapter = native_adapter()
    for token in (-1, 64, 2**31 - 1, 2**40):
        with pytest.raises(GenerationError, match="vocabulary of 64"):
            adapter.forward([StepPlan(0, (token,))], adapter.new_cache(batch=1, capacity=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_end_the_text_with_an_error(
    broken: float, dtype: torch.dtype
) -> None:
    model = native_model("llama", dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = broken
    decoder = Decoder.from_model(model, execution="native")
    with pytest.raises(GenerationError, match="NaN or infinite"):
        decoder.generate(list(tokens_of(5)), max_new_tokens=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_of_each_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 48, generator=generator).mul(3).round().to(dtype)  # with many ties
    rows[3] = -torch.inf
    rows[4, 17] = torch.inf
    rows[5] = -3e38
    rows[6:54].fill_(0)[range(48), range(48)] = 1  # once in every place
    found = native_library().largest(rows)
    assert found is not None
    best, places = found
    assert torch.equal(best, rows.float().amax(-1))
    firsts = [row.tolist().index(max(row.tolist())) for row in rows]
    assert places.tolist() == firsts


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_a_number_that_is_none_has_no_largest(dtype: torch.dtype) -> None:
    for place in range(48):
        row = torch.arange(48.0).to(dtype)[None].clone()
        row[0, place] = torch.nan
        found = native_library().largest(row)
        assert found is not None
        assert found[0].isnan().all()


def test_rows_that_are_left_to_torch() -> None:
    library, rows = native_library(), torch.zeros(4, 64)
    for other in (rows.half(), rows.double(), rows[:, :48], rows.t().clone(), rows.to("meta")):
        assert library.largest(other) is None


@pytest.mark.parametrize("settings", [{"execution": "native"}, {}, {"adapter": "hf"}], ids=str)
def test_a_copy_of_a_decoder_decodes_with_weights_of_its_own(settings: dict[str, Any]) -> None:
    decoder = Decoder.from_model(native_model(), **settings)
    expected = decoder.generate(tokens_of(9), max_new_tokens=9)
    twin = copy.deepcopy(decoder)
    assert twin.execution == decoder.execution
    with torch.no_grad():
        for weight in decoder.adapter.model.parameters():
            weight.zero_()
    assert twin.generate(tokens_of(9), max_new_tokens=9).tokens == expected.tokens
    again = copy.deepcopy(twin)
    assert again.generate(tokens_of(9), max_new_tokens=9).tokens == expected.tokens
    assert decoder.generate(tokens_of(9), max_new_tokens=9).tokens != expected.tokens


class TestWhatItIsNotFor:
    def refused(self, reason: str, **settings: Any) -> None:
        model = settings.pop("model", None) or native_model()
        with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
            Decoder.from_model(model, execution="native", **settings)
        assert "\n" not in str(caught.value)

    def test_another_dtype(self) -> None:
        self.refused("float32 and bfloat16, not torch.float64", model=native_model().double())

    def test_heads_that_are_too_small(self) -> None:
        self.refused("no kernel for heads of 8 numbers", model=own_model())

    def test_another_activation(self) -> None:
        model = native_model()
        model.model.layers[2].mlp.act_fn = torch.nn.GELU()
        self.refused("the activation is GELU, not SiLU", model=model)

    def test_an_activation_with_a_hook(self) -> None:
        model = native_model()
        model.model.layers[2].mlp.act_fn.register_forward_hook(nothing)
        self.refused("not SiLU", model=model)

    def test_another_backend(self) -> None:
        self.refused("needs backend=auto, not sdpa", backend="sdpa")

    def test_another_adapter(self) -> None:
        self.refused("needs adapter=llama (the LLaMA family), not hf", adapter="hf")

    def test_a_model_that_was_made_in_inference_mode(self) -> None:
        with torch.inference_mode():
            model = native_model()
        self.refused(
            "which cannot run this model: its model.layers.0.self_attn.q_proj", model=model
        )

    @pytest.mark.skipif(not can_pack(torch.float32), reason="this build of torch cannot pack")
    def test_packed_weights(self) -> None:
        model = native_model()
        prepare_execution(model, "packed")
        self.refused("were packed", model=model)

    @pytest.mark.parametrize(
        ("name", "size", "dtype", "unit"),
        [
            ("vocab_size", 70, torch.float32, 16),
            ("hidden_size", 72, torch.float32, 16),
            ("hidden_size", 80, torch.bfloat16, 32),
            ("intermediate_size", 112, torch.bfloat16, 32),
        ],
    )
    def test_sizes_that_are_not_whole(
        self, name: str, size: int, dtype: torch.dtype, unit: int
    ) -> None:
        config = CONFIGS["llama"]()
        setattr(config, name, size)
        model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
        self.refused(f"size, {size}, is no multiple of {unit}", model=model)

    @pytest.mark.parametrize("window", [0, -1])
    def test_a_window_that_hides_a_row_from_itself(self, window: int) -> None:
        config = CONFIGS["mistral"]()
        config.sliding_window = window
        model = AutoModelForCausalLM.from_config(config).eval()
        self.refused(f"a sliding window of {window}", model=model)


def test_auto_takes_it_where_it_can() -> None:
    def picked(model: Any, **settings: Any) -> str:
        return Decoder.from_model(model, execution="auto", **settings).execution

    other = "packed" if can_pack(torch.float32) else "eager"
    assert picked(native_model()) == "native"
    assert picked(native_model(), backend="sdpa") == other
    assert picked(native_model(), adapter="hf") == other
    assert picked(own_model()) == other


def test_defaults_of_torch_that_somebody_has_changed() -> None:
    decoder = Decoder.from_model(native_model(), execution="native")
    prompt = list(tokens_of(9))
    expected = decoder.generate(prompt, max_new_tokens=9).tokens
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            assert decoder.generate(prompt, max_new_tokens=9).tokens == expected
        torch.set_default_dtype(before)
        torch.set_default_device("meta")
        adapter = decoder.adapter
        cache = adapter.new_cache(batch=1, capacity=9)
        (logits,) = adapter.forward([StepPlan(0, tuple(prompt))], cache)
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert int(logits[0].argmax()) == expected[0]


def prune_the_mlp(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj = torch.nn.Linear(64, 32, bias=False)
    mlp.up_proj = torch.nn.Linear(64, 32, bias=False)
    mlp.down_proj = torch.nn.Linear(32, 64, bias=False)


def prune_the_heads(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = torch.nn.Linear(64, 64, bias=False)
    attention.o_proj = torch.nn.Linear(64, 64, bias=False)
    attention.num_key_value_groups = 1


def scatter_a_weight(model: Any) -> None:
    down = model.model.layers[2].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight.detach().t().contiguous().t())


def spread_a_norm(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(torch.ones(1).expand(64))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (prune_the_mlp, "its gate_up is [64, 64] of torch.float32, unlike the others"),
        (prune_the_heads, "different numbers of heads"),
        (scatter_a_weight, "its down does not lie in memory in one piece"),
        (spread_a_norm, "its norm does not lie in memory in one piece"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_weights_that_are_not_as_the_library_takes_them(change: Any, reason: str) -> None:
    """Before, and between two texts: nothing is read that is not there."""
    prompt = list(tokens_of(9))
    model = native_model()
    change(model)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        Decoder.from_model(model, execution="native")
    expected = Decoder.from_model(model).generate(prompt, max_new_tokens=9).tokens
    decoder = Decoder.from_model(model, execution="auto")
    assert decoder.execution != "native"
    assert decoder.generate(prompt, max_new_tokens=9).tokens == expected
    model = native_model()
    decoder = Decoder.from_model(model, execution="native")
    decoder.generate(prompt, max_new_tokens=2)
    change(model)
    other = Decoder.from_model(copy.deepcopy(model)).generate(prompt, max_new_tokens=9).tokens
    assert decoder.generate(prompt, max_new_tokens=9).tokens == other


def test_a_norm_that_became_shorter_is_not_read_beyond_its_end() -> None:
    model = native_model()
    decoder = Decoder.from_model(model, execution="native")
    model.model.norm.weight = torch.nn.Parameter(torch.ones(16))
    with pytest.raises(RuntimeError):  # torch's
        decoder.generate(list(tokens_of(9)), max_new_tokens=4)


def test_layers_and_heads_that_were_added_between_two_texts() -> None:
    """The cache of the last text has no place for them."""
    model = native_model()
    prompt = list(tokens_of(9))
    expected = Decoder.from_model(model).generate(prompt, max_new_tokens=9).tokens
    model.config.num_hidden_layers = 1
    decoder = Decoder.from_model(model, execution="native")
    decoder.generate(prompt, max_new_tokens=9)
    model.config.num_hidden_layers = 3
    assert decoder.generate(prompt, max_new_tokens=9).tokens == expected
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            setattr(layer.self_attn, name, torch.nn.Linear(64, 128, bias=False))
        layer.self_attn.num_key_value_groups = 1
    expected = Decoder.from_model(copy.deepcopy(model)).generate(prompt, max_new_tokens=9).tokens
    assert decoder.generate(prompt, max_new_tokens=9).tokens == expected


def test_whoever_packs_next_finds_no_weights_held() -> None:
    adapter = build_adapter(own_model(), adapter="llama")
    assert isinstance(adapter, LlamaAdapter)
    assert "heads of 8" in str(adapter.native_obstacle())
    assert adapter._passes is None


def test_what_compiling_cost_is_reported() -> None:
    decoder = Decoder.from_model(native_model(), execution="native")
    cost = decoder.compilation
    assert cost is not None
    assert (cost.count == 0) == (cost.seconds == 0)
