"""Fused linear layers: one weight, held once, and the parts stay what they were."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from decodekit.adapters.execution.fused import fuse_linears, fused_linear, have_biases_alike
from decodekit.adapters.execution.packed import PackedRows, can_pack, pack_linears

ROWS = (6, 4, 4)


def linears(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.ModuleList(nn.Linear(8, rows, bias=bias, dtype=dtype) for rows in ROWS)


def states() -> Tensor:
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages that tensors lie in, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_layer_gives_the_outputs_of_its_parts_side_by_side(bias: bool) -> None:
    parts = linears(bias=bias)
    expected = [part(states()) for part in parts]
    state = copy.deepcopy(parts.state_dict())
    identities = [id(parameter) for parameter in parts.parameters()]
    fused = fuse_linears(list(parts))
    outputs = fused(states()).split(ROWS, dim=-1)
    for part, own, output in zip(parts, expected, outputs, strict=True):
        torch.testing.assert_close(output, own, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(part(states()), own, atol=1e-6, rtol=1e-6)
    assert [id(parameter) for parameter in parts.parameters()] == identities
    assert parts.state_dict().keys() == state.keys()
    for name, tensor in parts.state_dict().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("bias", [False, True])
def test_nothing_is_held_twice(bias: bool) -> None:
    parts = linears(bias=bias)
    before = held(parts.parameters())
    fused = fuse_linears(list(parts))
    assert held([*parts.parameters(), *fused.parameters()]) == before
    with torch.no_grad():
        parts[1].weight.fill_(3.0)
    assert torch.equal(fused.weight[6:10], torch.full((4, 8), 3.0))


def test_what_is_fused_is_not_fused_again() -> None:
    parts = list(linears(bias=True))
    assert fused_linear(parts) is None
    first, second = fuse_linears(parts), fuse_linears(parts)
    assert first.weight.data_ptr() == second.weight.data_ptr() == parts[0].weight.data_ptr()
    assert first.bias.data_ptr() == second.bias.data_ptr()
    assert fused_linear(parts) is not None


def test_only_the_whole_group_in_its_order_is_one() -> None:
    parts = list(linears())
    fuse_linears(parts)
    assert fused_linear(parts[:2]) is None
    assert fused_linear(parts[1:]) is None
    assert fused_linear([parts[0], parts[2], parts[1]]) is None
    assert fused_linear([nn.Linear(8, 4, device="meta"), nn.Linear(8, 4, device="meta")]) is None


@pytest.mark.parametrize("biased", range(3))
def test_layers_of_which_some_have_a_bias_are_no_group(biased: int) -> None:
    parts = linears()
    fuse_linears(list(parts))
    parts[biased].bias = nn.Parameter(torch.ones(ROWS[biased]))
    assert not have_biases_alike(list(parts))
    assert fused_linear(list(parts)) is None
    if can_pack(torch.float32):
        expected = [part(states()) for part in parts]
        assert pack_linears(parts) == 3
        with torch.no_grad():
            for part, own in zip(parts, expected, strict=True):
                torch.testing.assert_close(part(states()), own, atol=1e-5, rtol=1e-5)


def test_neighbours_in_a_larger_storage_are_no_group() -> None:
    """As in a file of weights that is mapped into memory."""
    file = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    parts = list(linears())
    for part, view in zip(parts, file[:14].split(ROWS), strict=True):
        part.weight.data = view
    assert fused_linear(parts) is None
    fused = fuse_linears(parts)
    assert fused.weight.untyped_storage().nbytes() == 14 * 8 * 4
    assert torch.equal(fused.weight, file[:14])


def test_a_copy_or_a_cast_of_fused_layers_is_a_model_of_its_own() -> None:
    parts = linears()
    fuse_linears(list(parts))
    twin = copy.deepcopy(parts)
    assert fused_linear(list(twin)) is None
    with torch.no_grad():
        twin[0].weight.zero_()
    assert parts[0].weight.abs().sum() > 0
    assert fused_linear(list(parts.double())) is None


def test_fusing_in_inference_mode_leaves_layers_that_can_be_used_outside_it() -> None:
    parts = linears()
    with torch.inference_mode():
        fuse_linears(list(parts))
    parts[0](states()).sum().backward()
    assert parts[0].weight.grad is not None
    assert parts[0].weight.grad.abs().sum() > 0


def test_threads_that_fuse_at_once_leave_one_group() -> None:
    for _ in range(20):
        parts = list(linears(bias=True))
        start = threading.Barrier(4)

        def work(parts: list[nn.Linear] = parts, start: threading.Barrier = start) -> None:
            start.wait()
            fuse_linears(parts)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert fused_linear(parts) is not None


@pytest.mark.skipif(not can_pack(torch.float32), reason="this build of torch cannot pack")
@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_group_is_packed_as_one(bias: bool) -> None:
    parts = linears(bias=bias)
    expected = [part(states()) for part in parts]
    fuse_linears(list(parts))
    assert pack_linears(parts) == 3
    with torch.no_grad():
        for part, own in zip(parts, expected, strict=True):
            torch.testing.assert_close(part(states()), own, atol=1e-5, rtol=1e-5)
    assert all(isinstance(part, PackedRows) for part in parts)
    assert len({id(part.whole) for part in parts}) == 1
    assert parts[0].whole.out_features == sum(ROWS)
    assert list(parts.parameters()) == []
    assert repr(parts[1]).startswith("PackedRows(\n  start=6, out_features=4")


@pytest.mark.skipif(not can_pack(torch.float32), reason="this build of torch cannot pack")
def test_layers_that_are_not_fused_are_packed_one_by_one() -> None:
    parts = linears()
    file = torch.randn(20, 8)
    for part, view in zip(parts, file[:14].split(ROWS), strict=True):
        part.weight.data = view
    assert pack_linears(parts) == 3
    assert [type(part).__name__ for part in parts] == ["PackedLinear"] * 3
