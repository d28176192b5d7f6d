"""Packed linear layers: the same numbers, and nothing else of the model is touched."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decodekit import Decoder
from decodekit.adapters.execution import onednn as packed_operator
from decodekit.adapters.execution import packed
from decodekit.adapters.execution.packed import PackedLinear, can_pack, pack_linears
from decodekit.backends.call_sizes import FEW, MORE
from decodekit.errors import ConfigError
from tests.support.tiny import greedy_loop, own_model, random_prompt, tiny_model

needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this build of torch cannot pack linear layers"
)


@needs_packing
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 2, 3, 13, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(
    dtype: torch.dtype, atol: float, rows: int, bias: bool
) -> None:
    if not can_pack(dtype):
        pytest.skip(f"{dtype} cannot be packed here")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        linear = nn.Linear(96, 80, bias=bias, dtype=dtype)
        states = torch.randn(2, rows, 96).to(dtype)
        layer = PackedLinear(linear)
        for form in (states, states[:, -1:], states.transpose(0, 1)):
            torch.testing.assert_close(layer(form), linear(form), atol=atol, rtol=atol)
    assert repr(layer) == "PackedLinear(in_features=96, out_features=80)"


@needs_packing
def test_a_packed_model_decodes_the_same_text() -> None:
    plain = tiny_model()
    expected = greedy_loop(plain, random_prompt(15), 40)
    for strategy in ("autoregressive", "lookahead"):
        model = copy.deepcopy(plain)
        decoder = Decoder.from_model(model, strategy=strategy, execution="packed")
        assert not any(type(module) is nn.Linear for module in model.modules())
        assert decoder.generate(random_prompt(15), max_new_tokens=40).tokens == expected
    assert any(type(module) is nn.Linear for module in plain.modules())


@needs_packing
def test_only_plain_linear_layers_on_a_cpu_are_packed() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "special": Special(4, 4),
            "wide": nn.Linear(4, 4, dtype=torch.float64),
            "elsewhere": nn.Linear(4, 4, device="meta"),
            "inner": nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        }
    )
    assert pack_linears(model) == 2
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["plain"] == kinds["inner.0"] == "PackedLinear"
    assert kinds["special"] == "Special"
    assert kinds["wide"] == kinds["elsewhere"] == "Linear"


class LowRank(nn.Module):
    """A layer and what LoRA adds to it, in the dtype of the added weights."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.ones_(self.down.weight)
        nn.init.ones_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        assert self.base.bias is None
        added = self.up(self.down(states.to(self.down.weight.device, self.down.weight.dtype)))
        return self.base(states) + added.to(self.base.weight.dtype)


@needs_packing
def test_low_rank_adapters_are_packed_with_the_layers_in_them() -> None:
    model = own_model()
    mlp = model.model.layers[1].mlp
    mlp.down_proj = LowRank(mlp.down_proj)
    expected = greedy_loop(model, random_prompt(15), 8)
    decoder = Decoder.from_model(model, execution="packed")
    assert type(mlp.down_proj.base) is type(mlp.down_proj.up) is PackedLinear
    assert mlp.down_proj.base.weight.shape == (32, 48)
    assert decoder.generate(random_prompt(15), max_new_tokens=8).tokens == expected


@needs_packing
@pytest.mark.parametrize("adapter", ["auto", "hf"])
def test_a_layer_with_a_hook_or_another_forward_is_left_alone(adapter: str) -> None:
    """They would be lost with the layer, and the text would be another."""

    def hooked(head: nn.Module) -> None:
        head.register_forward_hook(lambda *given: -given[-1])

    def hooked_before(head: nn.Module) -> None:
        head.register_forward_pre_hook(lambda *given: (-given[-1][0],))

    def patched(head: nn.Module) -> None:
        forward = head.forward
        head.forward = lambda states: -forward(states)

    for change in (hooked, hooked_before, patched):
        model = own_model()
        change(model.lm_head)
        expected = greedy_loop(model, random_prompt(15), 8)
        decoder = Decoder.from_model(model, adapter=adapter, execution="packed")
        assert decoder.generate(random_prompt(15), max_new_tokens=8).tokens == expected
        assert type(model.model.layers[0].mlp.up_proj) is PackedLinear


@needs_packing
@pytest.mark.parametrize("adapter", ["hf", "llama"])
def test_a_packed_model_is_neither_saved_nor_cast(adapter: str, tmp_path: Path) -> None:
    """Without an error, a checkpoint without most of the weights would be written."""
    for attempt in (
        lambda model: model.save_pretrained(tmp_path),
        lambda model: torch.save(model, io.BytesIO()),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("meta"),
    ):
        model = own_model("llama-biased")
        Decoder.from_model(model, adapter=adapter, execution="packed")
        model.to("cpu", torch.float32)  # where it is
        with pytest.raises(ConfigError, match=r"cannot be \w+.*; load the model again with"):
            attempt(model)
    assert list(tmp_path.glob("*.safetensors")) == []


@needs_packing
@pytest.mark.parametrize("adapter", ["hf", "llama"])
def test_a_copy_of_a_packed_model_is_a_model(adapter: str) -> None:
    model = own_model("llama-biased")
    expected = greedy_loop(model, random_prompt(15), 8)
    Decoder.from_model(model, adapter=adapter, execution="packed")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.plain_bias.zero_()
        model.model.embed_tokens.weight.zero_()
    for decoder in (Decoder.from_model(twin), Decoder.from_model(twin, adapter="hf")):
        assert decoder.generate(random_prompt(15), max_new_tokens=8).tokens == expected


@needs_packing
@pytest.mark.parametrize("adapter", ["hf", "llama"])
def test_prompts_of_any_length_make_calls_of_few_sizes(
    adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN keeps what it made for each number of rows: memory would grow with them."""
    sizes: set[int] = set()
    real = packed_operator._run

    def watched(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sizes.add(len(states))
        return real(states, weight, bias)

    decoder = Decoder.from_model(own_model(), adapter=adapter, execution="packed")
    monkeypatch.setattr(packed_operator, "_run", watched)
    for length in range(1, 61, 2):
        decoder.generate(random_prompt(length), max_new_tokens=2)
    assert len(sizes) > 1
    assert sizes <= {*FEW, *MORE}


def test_the_default_device_does_not_matter() -> None:
    can_pack.cache_clear()
    expected = can_pack(torch.float32)
    can_pack.cache_clear()
    try:
        with torch.device("meta"):
            assert can_pack(torch.float32) is expected
    finally:
        can_pack.cache_clear()


def test_where_nothing_can_be_packed_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no linear layer that can be packed here; use"):
        pack_linears(nn.Sequential(nn.ReLU()))
    monkeypatch.setattr(packed, "PackedLinear", lambda linear: linear.nothing)
    can_pack.cache_clear()
    try:
        assert not can_pack(torch.float32)
    finally:
        monkeypatch.undo()
        can_pack.cache_clear()


def test_executions() -> None:
    model = copy.deepcopy(tiny_model(dtype=torch.float64))
    with pytest.raises(ConfigError, match="unknown execution 'pakced': did you mean 'packed'"):
        Decoder.from_model(model, execution="pakced")
    Decoder.from_model(model, execution="auto")  # float64 cannot be packed, so it is left alone
    assert any(type(module) is nn.Linear for module in model.modules())
