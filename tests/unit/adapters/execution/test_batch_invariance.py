"""Calls of such numbers of rows that a row keeps its bits, on processors of several kinds."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decodekit.adapters.execution.packed import can_pack
from decodekit.backends.call_sizes import FEW, MORE, CallSizes, find_sizes, in_calls, probe_weights

WIDTH, OUT = 96, 40


class Processor:
    """A layer whose rows are added up in an order that depends on where they stand.

    Args:
        order: The number of the order, of a call's rows and a row's place among them.
        dtype: What goes in and comes out; sums are float32, as everywhere.
        weights: [out, in].

    Attributes:
        called: The numbers of rows that it was called with.
    """

    def __init__(
        self, order: Callable[[int, int], int], dtype: torch.dtype, weights: Tensor
    ) -> None:
        self._order, self._dtype, self._weights = order, dtype, weights
        self.called: set[int] = set()

    def __call__(self, states: Tensor) -> Tensor:
        self.called.add(len(states))
        terms = states.float()[:, None] * self._weights.float()
        sums = {}
        places = [self._order(len(states), place) for place in range(len(states))]
        for number in set(places):
            total = torch.zeros(len(states), OUT)
            for column in range(WIDTH):
                total = total + terms[..., column * (1, 5, 7, 11)[number] % WIDTH]
            sums[number] = total.to(self._dtype)
        return torch.stack([sums[number][place] for place, number in enumerate(places)])


PROCESSORS: dict[str, tuple[Callable[[int, int], int], list[int]]] = {
    "like Zen 4: one row is another order": (lambda rows, _: int(rows == 1), [*FEW, *MORE]),
    "like AMX: 33 rows are another order, and 37": (
        lambda rows, _: (rows > 32) + (rows > 36),
        [*FEW],
    ),
    "like AVX: another order from some number on": (
        lambda rows, _: int(rows > 100),
        [*FEW, *MORE[:-2]],
    ),
    "fewer than seven rows are another order": (
        lambda rows, _: int(rows < 7),
        [*FEW[1:], *MORE],
    ),
    "whole blocks of 16 rows are another order": (
        lambda rows, _: int(rows % 16 == 0),
        [16, 32, 48, 64, 80, 96, 112, 128],
    ),
    "the last three of more than four rows are another order": (
        lambda rows, place: int(rows > 4 and place >= rows - 3),
        [4],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", PROCESSORS)
def test_rows_keep_their_bits_in_the_calls_that_were_found(kind: str, dtype: torch.dtype) -> None:
    order, expected = PROCESSORS[kind]
    weights, states = probe_weights(WIDTH, OUT, dtype)
    layer = Processor(order, dtype, weights)
    found = find_sizes(layer, states, FEW)
    found = find_sizes(layer, states, MORE, found)
    assert found == CallSizes(tuple(expected), invariant=True)
    draws = torch.Generator().manual_seed(1)
    layer = Processor(order, dtype, torch.randn(OUT, WIDTH, generator=draws).to(dtype))
    rows = torch.randn(150, WIDTH, generator=draws).to(dtype)
    together = in_calls(layer, rows, found.calls(150))
    for some in (slice(0, 1), slice(7, 10), slice(60, 97), slice(149, 150)):
        count = some.stop - some.start
        assert torch.equal(in_calls(layer, rows[some], found.calls(count)), together[some])
    assert layer.called <= set(expected), "a call that was not tried"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_the_place_of_a_row_matters_nothing_is_promised(dtype: torch.dtype) -> None:
    weights, states = probe_weights(WIDTH, OUT, dtype)
    layer = Processor(lambda _, place: place % 2, dtype, weights)
    found = find_sizes(layer, states, FEW)
    assert found == CallSizes(FEW, invariant=False)
    assert find_sizes(layer, states, MORE, found) == CallSizes((*FEW, *MORE), invariant=False)


def test_calls() -> None:
    sizes = CallSizes((4, 8, 16, 24, 32), invariant=True)
    assert [sizes.calls(rows) for rows in (1, 4, 5, 32, 33, 70)] == [
        [4],
        [4],
        [8],
        [32],
        [32, 4],
        [32, 32, 8],
    ]


def test_what_is_probed_with_comes_to_nothing_and_depends_on_no_settings() -> None:
    for width in (96, 97):
        weights, states = probe_weights(width, 70, torch.bfloat16)
        assert weights.shape == (70, width)
        assert (weights.double() @ states[0].double()).abs().max() < 1e-12
        state = torch.get_rng_state()
        with torch.device("meta"):
            again = probe_weights(width, 70, torch.bfloat16)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(again[0], weights)


KERNELS = """
import json
import torch
from torch import nn
from decodekit.adapters.execution.packed import PackedLinear, can_pack

torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
report = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for width, out, bias in ((576, 1536, True), (1536, 96, False), (4096, 96, True)):
        if not can_pack(dtype):
            continue
        linear = nn.Linear(width, out, bias=bias, dtype=dtype)
        half = torch.randn(out, width // 2, generator=draws)
        linear.weight = nn.Parameter(torch.cat([half, -half], 1).to(dtype), requires_grad=False)
        layer = PackedLinear(linear.requires_grad_(False))
        rows = torch.randn(300, width // 2, generator=draws)
        rows = torch.cat([rows, rows], 1).to(dtype)
        together = layer(rows)
        same = all(
            torch.equal(layer(rows[start : start + count]), together[start : start + count])
            for count in (1, 2, 3, 13, 33, 37, 64, 200)
            for start in (0, 5, 90)
        )
        report.append([layer.call_sizes.invariant, same])
print(json.dumps(report))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are those of x86-64")
@pytest.mark.parametrize("kernels", ["SSE41", "AVX", "DEFAULT"])
def test_every_kind_of_kernel_of_this_processor_does_what_was_found(kernels: str) -> None:
    """Those for less than the processor has stand for other processors."""
    if not can_pack(torch.float32):
        pytest.skip("this build of torch cannot pack linear layers")
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": kernels},
    )
    report = json.loads(done.stdout)
    assert report
    for invariant, same in report:
        assert same or not invariant, "a promise that is not kept"
