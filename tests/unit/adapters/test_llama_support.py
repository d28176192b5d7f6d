"""What the ``llama`` adapter refuses, and what ``adapter=auto`` makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from decodekit import Decoder
from decodekit.adapters.execution.packed import PackedLinear
from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.llama import LlamaAdapter, obstacle
from decodekit.backends.eager import EagerBackend
from decodekit.decoder.build import build_adapter, prepare_execution
from decodekit.errors import ConfigError, ModelSupportError
from tests.support.tiny import (
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


def _emptied(model: Any) -> None:
    model.model.layers = nn.ModuleList()


def _pruned(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = nn.Linear(32, 8, bias=False), nn.Linear(32, 8, bias=False)


def _one_for_two(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[1].mlp.up_proj.weight


def _one_for_two_layers(model: Any) -> None:
    first, second, *_ = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight


def _in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(48, 32))


def _damped(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def _shortened(model: Any) -> None:
    model.model.embed_tokens.max_norm = 0.5


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
        (_emptied, "it has no layers"),
        (_pruned, "its layers have several sizes of heads or numbers of kv heads"),
        (
            _one_for_two,
            r"its model\.layers\.1\.mlp\.up_proj and its \S+gate_proj share their weights",
        ),
        (_one_for_two_layers, r"layers\.1\.self_attn\.q_proj and its \S+layers\.0\S+q_proj share"),
        (_in_inference_mode, r"layers\.0\.mlp\.up_proj was made in inference mode"),
        (
            _damped,
            r"epsilon of its model\.layers\.1\.input_layernorm is 0\.5, not rms_norm_eps=1e-06",
        ),
        (_shortened, r"its embedding shortens long vectors \(max_norm\)"),
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
        "emptied",
        "pruned",
        "one-for-two",
        "one-for-two-layers",
        "in-inference-mode",
        "damped",
        "shortened",
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


def test_a_class_that_was_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries do that replace a class's forward for all models of the process."""
    model = own_model()
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", _nothing)
    assert (
        obstacle(model)
        == "the forward of its model.layers.0.mlp was replaced (offloaded or patched)"
    )


def test_a_hook_on_every_module_of_the_process_is_refused() -> None:
    model = own_model()
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        handle = register(_nothing)
        try:
            assert obstacle(model) == "there is a hook on all modules, which would be skipped"
        finally:
            handle.remove()
        assert obstacle(model) is None


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


def test_a_key_that_is_no_text_is_an_unknown_one() -> None:
    with pytest.raises(ConfigError, match="unknown key 1 in 'adapter'"):
        build_adapter(tiny_model(), adapter={"name": "llama", 1: 2})


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
