"""What the ``llama`` adapter refuses, and what ``adapter=auto`` makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decodekit import Decoder
from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.llama import LlamaAdapter, obstacle
from decodekit.backends.eager import EagerBackend
from decodekit.errors import ConfigError, ModelSupportError
from decodekit.execution.packed import PackedLinear
from decodekit.factory import build_adapter, prepare_execution
from tests.tiny import (
    LLAMA_FAMILY,
    own_model,
    tiny_model,
)


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
    model = own_model()
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
    model = own_model()
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert obstacle(model) is None


@pytest.mark.parametrize("kind", [*LLAMA_FAMILY, "gpt2", "gemma2"])
def test_auto_picks_llama_where_it_fits_and_says_so(kind: str) -> None:
    decoder = Decoder.from_model(own_model(kind), backend="eager")
    assert decoder.adapter_name == ("llama" if kind in LLAMA_FAMILY else "hf")
    changed = own_model(kind)
    changed.register_forward_hook(_nothing)
    assert build_adapter(changed, backend="eager").name == "hf"


class Special(nn.Parameter):
    """A weight of a class of its own in a plain layer, as torchao quantises."""


def test_weights_of_a_class_of_their_own_are_left_alone() -> None:
    model = own_model()
    layer = model.model.layers[1].mlp
    layer.up_proj.weight = Special(layer.up_proj.weight.detach())
    with pytest.raises(ModelSupportError, match=r"layers.1.mlp.up_proj.weight is a Special"):
        LlamaAdapter(model, EagerBackend())
    assert isinstance(build_adapter(model), HFAdapter)
    prepare_execution(model, "auto")
    assert type(layer.up_proj) is nn.Linear
    assert type(layer.down_proj) is PackedLinear


def test_automatic_packing_of_nothing_is_no_error() -> None:
    model = own_model()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = Special(module.weight.detach())
    assert prepare_execution(model, "auto") == "eager"
    with pytest.raises(ConfigError, match="no linear layer that can be packed"):
        prepare_execution(model, "packed")
