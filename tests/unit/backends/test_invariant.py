"""Rows whose results are the same bits, whatever else is in the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from decodekit import Decoder
from decodekit.adapters.execution.packed import PackedLinear, can_pack
from decodekit.backends.call_sizes import FEW, MORE, CallSizes
from decodekit.backends.flash_kernels import select_kernel
from decodekit.backends.invariant import settled
from decodekit.backends.invariant.backend import InvariantBackend
from decodekit.backends.invariant.settled import attend_settled
from decodekit.backends.sdpa import SDPABackend
from decodekit.decoder.build import build_backend
from decodekit.decoder.invariance import invariance_obstacle
from decodekit.errors import BackendError
from decodekit.interfaces import AttentionBackend
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree
from tests.behaviour.test_lossless import STRATEGIES
from tests.property.strategies import trees
from tests.support.attention import attend, random_states
from tests.support.native import native_model, needs_compiler
from tests.support.tiny import own_model, random_prompt

HALF = [torch.bfloat16, torch.float16]
LAYOUT, DIM = (6, 2), 64


def alone(
    backend: AttentionBackend,
    plan: StepPlan,
    states: tuple[Tensor, Tensor, Tensor],
    node: int,
    *,
    window: int | None = None,
) -> Tensor:
    """Return the output of ``node`` as it is when its path was committed before, row by row."""
    query, key, value = states
    path = plan.tree.path(node)
    lead = plan.prefix + len(plan.pending)
    places = [*range(lead), *(lead + one for one in path)]
    mask = StepPlan(len(places) - 1, (0,)).mask()
    row = query[:, :, plan.anchor_row + 1 + node][:, :, None]
    parts = (row, key[:, :, places], value[:, :, places])
    return attend(backend, [mask], parts, window=window)[0, 0]


@settings(max_examples=40)
@given(
    prefix=st.integers(0, 400) | st.integers(0, 2600) | st.sampled_from([287, 288, 543, 544]),
    pending=st.integers(1, 3) | st.integers(10, 600),
    tree=trees(max_nodes=40),
    window=st.none() | st.integers(280, 700),
    dtype=st.sampled_from(HALF),
    seed=st.integers(0, 99),
)
def test_a_node_has_the_bits_of_its_path_committed_alone(
    prefix: int,
    pending: int,
    tree: TokenTree,
    window: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    plan = StepPlan(prefix, (0,) * pending, tree)
    states = random_states([plan.mask()], LAYOUT, dtype, seed, dim=DIM)
    for backend in (InvariantBackend(), build_backend("auto")):
        output = attend(backend, [plan.mask()], states, window=window)[0]
        for node in range(len(tree)):
            expected = alone(backend, plan, states, node, window=window)
            assert torch.equal(output[plan.anchor_row + 1 + node], expected)


class Kernel:
    """Torch's kernel, which takes the keys of some rows from the other end.

    Args:
        backwards: Of which rows, by their number in a call and their place.
    """

    def __init__(self, backwards: Callable[[int, int], bool]) -> None:
        self._backwards = backwards
        self._kernel = select_kernel(torch.device("cpu"))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows = query.shape[2]
        output, log = self._kernel(query, key, value, scale=scale)
        other = self._kernel(query, key.flip(2), value.flip(2), scale=scale)
        at = torch.tensor([self._backwards(rows, place) for place in range(rows)])
        return torch.where(at[:, None], other[0], output), torch.where(at, other[1], log)


@pytest.mark.parametrize(
    ("backwards", "found"),
    [
        (lambda rows, _: rows > 32, FEW),
        (lambda rows, _: rows < 8, (*FEW[1:], *MORE)),
        (lambda _, place: place % 2 == 1, None),
    ],
    ids=["32 rows at most", "8 rows at least", "hopeless"],
)
def test_nodes_keep_their_bits_on_a_processor_with_another_kernel(
    backwards: Callable[[int, int], bool],
    found: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no calls give a row the same bits, all keys are added up in float64."""
    if not found_here(300):
        pytest.skip("torch's own kernel gives no number of rows the same bits here")
    kernel = Kernel(backwards)
    monkeypatch.setattr(settled, "select_kernel", lambda _: kernel)
    settled._call_sizes.cache_clear()
    try:
        assert found_here(300) == found
        plan = StepPlan(400, (0,), TokenTree.chain((0,) * 40))
        states = random_states([plan.mask()], LAYOUT, torch.bfloat16, dim=DIM)
        output = attend(InvariantBackend(), [plan.mask()], states)[0]
        for node in (0, 1, 7, 20, 39):
            expected = alone(InvariantBackend(), plan, states, node)
            assert torch.equal(output[1 + node], expected), node
    finally:
        settled._call_sizes.cache_clear()


def found_here(keys: int) -> tuple[int, ...] | None:
    """Return the numbers of rows that calls over so many keys may have; None if there are none."""
    shape = (1, LAYOUT[1], keys, DIM)
    settings = settled._settings()
    found = settled._call_sizes(shape, torch.bfloat16, 0.125, True, *settings)
    return found.sizes if found.invariant else None


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("keys", [256, 448, 2048, 2304])
def test_rows_over_settled_keys_do_what_was_found(keys: int, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(keys)
    query = torch.randn(1, 6, 90, DIM, generator=draws).to(dtype)
    key, value = torch.randn(2, 1, 2, keys, DIM, generator=draws).to(dtype)
    together = attend_settled(query, key, value, scale=0.125)
    if together is None:
        return  # then nothing uses it
    assert len(together) == 1 + (keys >= 2048)
    expected = scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), scale=0.125
    )
    logs = torch.stack([log for _, log in together])
    merged = sum(
        output.float() * part[..., None]
        for (output, _), part in zip(together, logs.softmax(0), strict=True)
    )
    torch.testing.assert_close(merged, expected.float(), atol=0.01, rtol=0.01)
    for some in (slice(0, 1), slice(5, 8), slice(40, 73)):
        found = attend_settled(query[:, :, some], key, value, scale=0.125)
        assert found is not None
        for (output, log), (all_outputs, all_logs) in zip(found, together, strict=True):
            assert torch.equal(output, all_outputs[:, :, some])
            assert torch.equal(log, all_logs[:, :, some])


def test_sdpa_has_not() -> None:
    """Guards the test above: bits do differ where nothing is done about it."""
    plan = StepPlan(300, (0,), TokenTree((0,) * 12, (*range(-1, 5), *range(-1, 5))))
    states = random_states([plan.mask()], LAYOUT, torch.bfloat16, dim=DIM)
    output = attend(SDPABackend(), [plan.mask()], states)[0]
    same = [
        torch.equal(output[1 + node], alone(SDPABackend(), plan, states, node))
        for node in range(12)
    ]
    assert not all(same)


@pytest.mark.parametrize("window", [None, 30, 90])
@pytest.mark.parametrize("prefix", [0, 70])
def test_a_prompt_has_the_same_bits_with_a_tree_below_it_and_in_a_batch(
    prefix: int, window: int | None
) -> None:
    prompt = StepPlan(prefix, (0,) * 50)
    with_tree = StepPlan(prefix, (0,) * 50, TokenTree.chain((0,) * 9))
    other = StepPlan(3, (0,), TokenTree.chain((0,) * 70))
    states = random_states([with_tree.mask(), other.mask()], LAYOUT, torch.bfloat16, dim=DIM)
    keys = prefix + 50

    def run(masks: list[TreeMask], rows: int, keys: int) -> Tensor:
        query, key, value = (part[: len(masks)] for part in states)
        parts = (query[:, :, :rows], key[:, :, :keys], value[:, :, :keys])
        return attend(InvariantBackend(), masks, parts, window=window)[0, :50]

    expected = run([prompt.mask()], 50, keys)
    assert torch.equal(run([with_tree.mask()], 59, keys + 9), expected)
    widest = states[0].shape[2], states[1].shape[2]
    assert torch.equal(run([with_tree.mask(), other.mask()], *widest), expected)


def test_a_device_without_float64_is_refused() -> None:
    with pytest.raises(BackendError, match="needs float64, which device 'mps' has not; use back"):
        InvariantBackend().lower(
            [StepPlan(0, (0,)).mask()],
            window=None,
            dtype=torch.float16,
            device=torch.device("mps"),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 576, 1536, 4096])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_of_a_packed_layer_has_the_same_bits_alone(
    width: int, dtype: torch.dtype, bias: bool
) -> None:
    if not can_pack(dtype):
        pytest.skip(f"{dtype} cannot be packed here")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = PackedLinear(nn.Linear(width, 96, bias=bias, dtype=dtype))
        states = torch.randn(1, 200, width).to(dtype)
    if not layer.call_sizes.invariant:  # then it has to be said
        reason = invariance_obstacle(Adapter(nn.Sequential(layer)), "packed")
        assert reason == "this processor's kernels for its 0 give no number of rows the same bits"
        return
    together = layer(states)
    for rows in (1, 2, 3, 13, 33, 36, 37, 64, 129):
        for start in (0, 5):
            some = layer(states[:, start : start + rows])
            assert torch.equal(some, together[:, start : start + rows]), rows
    assert layer(states[0, 0]).shape == (96,)
    assert layer(states[:, :0]).shape == (1, 0, 96)


class Adapter:
    """As much of an adapter as has to be known."""

    def __init__(self, model: Any, backend: str = "auto", dtype: torch.dtype | None = None) -> None:
        self.model = model
        model.dtype = dtype or torch.bfloat16
        self.backend = build_backend(backend)


def told(**settings: Any) -> str | None:
    dtype = settings.pop("dtype", torch.float32)
    return Decoder.from_model(own_model(dtype=dtype), **settings).invariance_obstacle


def test_what_can_be_promised_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told() == "its model.layers.0.self_attn.q_proj is not packed"
    if can_pack(torch.float32):
        sdpa = "attention by sdpa, which backend=auto takes in this dtype, adds up by the number of"
        assert told(execution="packed") == f"{sdpa} rows"
        assert told(execution="packed", backend="invariant") is None
        assert told(execution="packed", backend="invariant", adapter="hf") is None
        hopeless = CallSizes((4,), invariant=False)
        monkeypatch.setattr(PackedLinear, "call_sizes", property(lambda _: hopeless))
        reason = told(execution="packed", backend="invariant")
        assert reason is not None
        assert reason.endswith(
            "for its model.layers.0.self_attn.q_proj give no number of rows the same bits"
        )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_execution_promises_the_same_bits_anywhere(dtype: torch.dtype) -> None:
    decoder = Decoder.from_model(native_model(dtype=dtype), execution="native")
    assert decoder.invariance_obstacle is None
    decoder.adapter.model.double()
    assert (decoder.invariance_obstacle or "").startswith("the model was changed, and now it has")


@pytest.mark.parametrize("adapter", ["llama", "hf"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_strategies_write_the_same_tokens_in_half_precision(kind: str, adapter: str) -> None:
    if not can_pack(torch.bfloat16):
        pytest.skip("bfloat16 cannot be packed here")
    model = own_model(kind, dtype=torch.bfloat16)
    decoders = [
        Decoder.from_model(model, strategy=strategy, adapter=adapter, execution="packed")
        for strategy in STRATEGIES
    ]
    obstacle = decoders[0].invariance_obstacle
    if obstacle is not None:
        assert "this processor's kernels" in obstacle
        return
    answers = [decoder.generate(random_prompt(40), max_new_tokens=60) for decoder in decoders]
    assert all(answer.tokens == answers[0].tokens for answer in answers)


def test_a_window_is_looked_at_row_by_row() -> None:
    """A node from which it hides something must not change how its neighbours are added up."""
    plan = StepPlan(300, (0,), TokenTree.chain((0,) * 30))
    states = random_states([plan.mask()], LAYOUT, torch.bfloat16, dim=DIM)
    output = attend(InvariantBackend(), [plan.mask()], states, window=320)[0]
    for node in range(30):  # at positions 301 to 330
        expected = alone(InvariantBackend(), plan, states, node, window=320)
        assert torch.equal(output[1 + node], expected), node
