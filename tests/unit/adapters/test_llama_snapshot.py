"""A model that is changed while a ``llama`` adapter is in use: the next text sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from decodekit import Decoder
from decodekit.adapters.execution.packed import can_pack
from decodekit.adapters.llama import LlamaAdapter
from decodekit.adapters.snapshot import Snapshot
from decodekit.backends.sdpa import SDPABackend
from decodekit.decoder.build import prepare_execution
from decodekit.errors import GenerationError, ModelSupportError
from decodekit.interfaces.plan import StepPlan
from tests.support.tiny import greedy_loop, logits_after, own_model, random_prompt

PROMPT = tuple(random_prompt(9))


def logits(adapter: LlamaAdapter) -> torch.Tensor:
    (rows,) = adapter.forward([StepPlan(0, PROMPT)], adapter.new_cache(batch=1, capacity=9))
    return rows[0]


def nothing(*given: Any) -> None:
    """A hook that changes nothing."""


def assign_data(model: Any) -> None:
    weight = model.model.layers[2].mlp.down_proj.weight
    weight.data = 2 * weight.data


def assign_data_of_a_fused_weight(model: Any) -> None:
    weight = model.model.layers[3].self_attn.k_proj.weight
    weight.data = 2 * weight.data


def assign_a_norm(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(3 * model.model.norm.weight.detach())


def assign_the_weight_of_the_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(3 * model.lm_head.weight.detach())


def add_one_bias(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.bias = nn.Parameter(torch.linspace(-1, 1, 16))


def exchange_a_layer(model: Any) -> None:
    model.model.layers[2] = copy.deepcopy(model.model.layers[1])
    model.model.layers[2].self_attn.layer_idx = 2


def drop_layers(model: Any) -> None:
    model.config.num_hidden_layers = 2


def turn_more_slowly(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 2


def turn_more_slowly_in_place(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


CHANGES: list[Callable[[Any], None]] = [
    assign_data,
    assign_data_of_a_fused_weight,
    assign_a_norm,
    assign_the_weight_of_the_head,
    add_one_bias,
    exchange_a_layer,
    drop_layers,
    turn_more_slowly,
    turn_more_slowly_in_place,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_exchanged_alone_is_noticed(change: Callable[[Any], None]) -> None:
    model = own_model()
    adapter = LlamaAdapter(model, SDPABackend())
    before = logits(adapter)
    change(model)
    expected = logits_after(model, PROMPT)
    assert (before - expected).abs().max() > 0.01
    torch.testing.assert_close(logits(adapter), expected, atol=1e-4, rtol=1e-5)


def test_a_window_that_is_taken_away_is_noticed() -> None:
    model = own_model("mistral")
    prompt = random_prompt(40)
    decoder = Decoder.from_model(model)
    before = decoder.generate(prompt, max_new_tokens=8).tokens
    model.config.sliding_window = None
    expected = greedy_loop(model, prompt, 8)
    assert decoder.generate(prompt, max_new_tokens=8).tokens == expected != before


def test_what_would_be_skipped_from_now_on_is_refused() -> None:
    model = own_model()
    adapter = LlamaAdapter(model, SDPABackend())
    logits(adapter)
    handle = model.model.layers[2].register_forward_hook(nothing)
    with pytest.raises(ModelSupportError, match=r"its model\.layers\.2 has a hook"):
        logits(adapter)
    handle.remove()
    logits(adapter)
    model.model.layers[1].mlp.forward = nothing
    with pytest.raises(
        ModelSupportError, match=r"the forward of its model\.layers\.1\.mlp was repl"
    ):
        logits(adapter)
    del model.model.layers[1].mlp.forward
    logits(adapter)
    down = model.model.layers[3].mlp.down_proj
    model.model.layers[3].mlp.down_proj = nn.Sequential(down)
    with pytest.raises(ModelSupportError, match=r"layers\.3\.mlp\.down_proj is a Sequential"):
        logits(adapter)


def test_what_is_still_there_is_not_read_anew() -> None:
    model = own_model("llama-biased")
    adapter = LlamaAdapter(model, SDPABackend())
    logits(adapter)
    lean = adapter._current().lean
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)  # in place: the views see it
    torch.testing.assert_close(logits(adapter), logits_after(model, PROMPT), atol=1e-4, rtol=1e-5)
    assert adapter._current().lean is lean
    assert Snapshot(model).is_of(model)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this build of torch cannot pack")
def test_a_layer_that_is_exchanged_after_packing() -> None:
    model = own_model()
    adapter = LlamaAdapter(model, SDPABackend())
    prepare_execution(model, "packed")
    before = logits(adapter)
    attention = model.model.layers[0].self_attn
    attention.k_proj = nn.Linear(32, 16, bias=False)
    nn.init.normal_(attention.k_proj.weight, std=0.4)
    expected = logits_after(model, PROMPT)
    assert (before - expected).abs().max() > 0.01
    torch.testing.assert_close(logits(adapter), expected, atol=1e-4, rtol=1e-5)


def test_a_model_that_was_cast_between_two_texts() -> None:
    """The next text takes the memory of the last one's cache, but not in another dtype."""
    model = own_model()
    decoder = Decoder.from_model(model)
    decoder.generate(list(PROMPT), max_new_tokens=4)
    model.double()
    expected = greedy_loop(model, PROMPT, 4)
    assert decoder.generate(list(PROMPT), max_new_tokens=4).tokens == expected


def test_a_model_that_is_cast_in_the_middle_of_a_text() -> None:
    """The text goes on with the weights that it began with, until another one begins."""
    model = own_model()
    adapter = LlamaAdapter(model, SDPABackend())
    cache = adapter.new_cache(batch=1, capacity=12)
    adapter.forward([StepPlan(0, PROMPT)], cache)
    cache.commit([range(9)])
    (before,) = adapter.forward([StepPlan(9, (1,))], cache)
    model.double()
    (after,) = adapter.forward([StepPlan(9, (1,))], cache)
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    assert logits(adapter).dtype == torch.float64
    with pytest.raises(
        GenerationError, match=r"in the middle of a text, from torch\.float32 on cpu"
    ):
        adapter.forward([StepPlan(9, (1,))], cache)
