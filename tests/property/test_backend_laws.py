"""Every attention backend equals ``eager`` on any tree, prefix, layout, dtype, window and batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit.backends.eager import EagerBackend
from decodekit.backends.flash import FlashBackend
from decodekit.backends.flex import FlexBackend
from decodekit.backends.invariant.backend import InvariantBackend
from decodekit.backends.merge import merge_parts
from decodekit.backends.sdpa import SDPABackend
from decodekit.backends.triton.backend import TritonBackend, TritonConfig
from decodekit.decoder.build import build_backend
from decodekit.interfaces import AttentionBackend
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan
from tests.property.strategies import trees
from tests.support.attention import (
    HALF_AND_SINGLE,
    NEEDS_TRITON,
    TOLERANCES,
    assert_close,
    attend,
    random_states,
)

LAYOUTS = [(1, 1), (4, 4), (6, 2), (9, 3), (8, 1), (7, 1)]  # query heads, kv heads


@dataclass(frozen=True)
class Kernel:
    """A backend, and what it supports on a CPU."""

    name: str
    build: Callable[[], AttentionBackend]
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES)
    dims: tuple[int, ...] = (1, 5, 8, 16, 64, 80, 96, 128, 256)
    softcap: bool = True
    sinks: bool = True
    examples: int = 60
    max_prefix: int = 600
    shrinks: bool = True


TRITON: dict[str, Any] = {
    "dtypes": HALF_AND_SINGLE,
    "examples": 12,
    "shrinks": False,
}
KERNELS = [
    Kernel("auto", lambda: build_backend("auto"), examples=30),
    Kernel("invariant", InvariantBackend),
    Kernel("flash", FlashBackend, softcap=False, examples=150),
    Kernel("flex", lambda: FlexBackend(compiled=False), examples=15),
    Kernel("sdpa", SDPABackend, softcap=False, sinks=False),
    Kernel("triton", TritonBackend, **TRITON),
    Kernel(
        "triton in 3 splits",
        lambda: TritonBackend(TritonConfig(splits=3)),
        **{**TRITON, "examples": 8},
    ),
]


@st.composite
def masks(draw: st.DrawFn, max_prefix: int) -> TreeMask:
    """Return the mask of a chain, of a tree, or of a chunk of a prompt with a tree behind it."""
    prefix = draw(st.just(0) | st.integers(0, 20) | st.integers(0, max_prefix))
    pending = draw(st.just(1) | st.integers(1, 40))
    tree = draw(st.just(None) | trees(max_nodes=30))
    plan = StepPlan(prefix, (0,) * pending)
    return (plan if tree is None else StepPlan(prefix, (0,) * pending, tree)).mask()


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(
            kernel, id=kernel.name, marks=[NEEDS_TRITON] if "triton" in kernel.name else []
        )
        for kernel in KERNELS
    ],
)
def test_it_equals_eager(kernel: Kernel) -> None:
    backend = kernel.build()

    # Shrinking a failure of a kernel in Python would take minutes.
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if kernel.shrinks else [])]

    @settings(max_examples=kernel.examples, phases=phases)
    @given(
        batch=st.lists(masks(kernel.max_prefix), min_size=1, max_size=3),
        layout=st.sampled_from(LAYOUTS),
        dim=st.sampled_from(kernel.dims),
        dtype=st.sampled_from(kernel.dtypes),
        window=st.none() | st.integers(1, 60) | st.integers(1, 700),
        softcap=st.sampled_from([None, 1.5, 30.0]) if kernel.softcap else st.none(),
        with_sinks=st.booleans() if kernel.sinks else st.just(False),
        spare=st.integers(0, 9),
        seed=st.integers(0, 99),
    )
    def check(
        batch: list[TreeMask],
        layout: tuple[int, int],
        dim: int,
        dtype: torch.dtype,
        window: int | None,
        softcap: float | None,
        with_sinks: bool,
        spare: int,
        seed: int,
    ) -> None:
        states = random_states(batch, layout, dtype, seed, dim=dim, spare=spare)
        sinks = torch.linspace(-3, 9, layout[0]).to(dtype) if with_sinks else None
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
        actual = attend(backend, batch, states, **options)
        expected = attend(EagerBackend(), batch, states, **options)
        assert actual.shape == expected.shape
        assert bool(torch.isfinite(actual).all())
        for index, mask in enumerate(batch):  # rows that pad a sequence may be anything finite
            assert_close(actual[index, : mask.rows], expected[index, : mask.rows], dtype)

    check()


# --- the merge ------------------------------------------------------------------------------------


def part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [1, 1, R, D] and log-sum-exp of a part of the keys; nothing seen is 0."""
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    return (weights @ values)[None, None], scores.logsumexp(dim=-1)[None, None]


@settings(max_examples=80)
@given(
    rows=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    sink=st.none() | st.floats(-50, 50),
    size=st.sampled_from([1.0, 100.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_parts_merge_into_the_softmax_over_all_keys(
    rows: int, sizes: list[int], sink: float | None, size: float, seed: int
) -> None:
    """Half of all scores are hidden, so rows see nothing of a part, or nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    keys = sum(sizes)
    scores = torch.randn((rows, keys), generator=generator, dtype=torch.float64) * size
    hidden = torch.rand((rows, keys), generator=generator) < 0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    values = torch.randn((keys, 3), generator=generator, dtype=torch.float64)
    parts = [
        part(some, few)
        for some, few in zip(scores.split(sizes, dim=1), values.split(sizes), strict=True)
    ]
    sinks = None if sink is None else torch.tensor([sink], dtype=torch.float64)
    merged = merge_parts(parts, sinks)
    if sink is not None:
        scores = torch.cat([scores, torch.full((rows, 1), sink, dtype=torch.float64)], dim=1)
        values = torch.cat([values, torch.zeros(1, 3, dtype=torch.float64)])
    expected, _ = part(scores, values)
    torch.testing.assert_close(merged, expected, atol=1e-12, rtol=1e-12)
