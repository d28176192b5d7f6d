"""Attention backends against a naive one that looks at one row, one head and one key at a time."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit.backends.eager import EagerBackend
from decodekit.backends.flash import FlashBackend
from decodekit.backends.flex import FlexBackend
from decodekit.backends.invariant.backend import InvariantBackend
from decodekit.backends.sdpa import SDPABackend
from decodekit.backends.triton.backend import TritonBackend
from decodekit.decoder.build import build_backend
from decodekit.errors import BackendError
from decodekit.interfaces import AttentionBackend, MaskBuilder
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree
from tests.support import attention
from tests.support.attention import NEEDS_TRITON, TOLERANCES, assert_close, attend

LAYOUTS = [(1, 1), (4, 4), (4, 2), (9, 3), (8, 1)]  # query heads, kv heads
DIM = 8


def random_plan(seed: int, *, prefix: int, pending: int, nodes: int) -> StepPlan:
    choose = random.Random(seed)
    tree = TokenTree((0,) * nodes, tuple(choose.randrange(-1, node) for node in range(nodes)))
    return StepPlan(prefix, (0,) * pending, tree)


def random_states(
    masks: list[TreeMask], layout: tuple[int, int], dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return attention.random_states(masks, layout, dtype, seed, dim=DIM)


def naive(
    mask: TreeMask,
    states: tuple[Tensor, Tensor, Tensor],
    *,
    window: int | None = None,
    scale: float = DIM**-0.5,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [R, H, D] of one sequence in Python floats, straight from the definitions."""
    query, key, value = (state[0].double().tolist() for state in states)
    groups = len(query) // len(key)
    out = torch.zeros(mask.rows, len(query), DIM, dtype=torch.float64)
    for head in range(len(query)):
        keys, values = key[head // groups], value[head // groups]
        for row in range(mask.rows):
            scores: dict[int, float] = {}
            for place in range(mask.prefix + mask.rows):
                if mask.sees(row, place, window=window):
                    pairs = zip(query[head][row], keys[place], strict=True)
                    score = scale * math.fsum(q * k for q, k in pairs)
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    scores[place] = score
            top = max(scores.values())  # exp of a large score has no float
            weights = {place: math.exp(score - top) for place, score in scores.items()}
            total = math.fsum(weights.values())
            if sinks is not None:
                total += math.exp(float(sinks[head]) - top)
            for place, weight in weights.items():
                out[row, head] += weight / total * torch.tensor(values[place], dtype=torch.float64)
    return out


@pytest.fixture(
    params=[
        partial(build_backend, "auto"),
        EagerBackend,
        FlashBackend,
        partial(FlexBackend, compiled=False),
        InvariantBackend,
        SDPABackend,
        pytest.param(TritonBackend, marks=NEEDS_TRITON),
    ],
    ids=["auto", "eager", "flash", "flex", "invariant", "sdpa", "triton"],
)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return request.param()  # type: ignore[no-any-return]


def test_all_are_attention_backends_and_say_their_name(backend: AttentionBackend) -> None:
    assert isinstance(backend, AttentionBackend)
    assert isinstance(backend, MaskBuilder)
    assert backend.name in {"auto", "eager", "flash", "flex", "invariant", "sdpa", "triton"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_eager_equals_the_naive_definition(layout: tuple[int, int], window: int | None) -> None:
    for seed, prefix in enumerate((0, 1, 6)):
        mask = random_plan(seed, prefix=prefix, pending=1 + seed, nodes=5).mask()
        states = random_states([mask], layout, torch.float64, seed)
        actual = attend(EagerBackend(), [mask], states, window=window)
        assert actual.shape == (1, mask.rows, layout[0], DIM)
        assert_close(actual[0], naive(mask, states, window=window), torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_equal_the_naive_definition_in_every_dtype(
    backend: AttentionBackend, layout: tuple[int, int], dtype: torch.dtype
) -> None:
    if backend.name == "triton" and dtype == torch.float64:
        pytest.skip("refused: triton has no float64 products")
    mask = random_plan(7, prefix=9, pending=2, nodes=6).mask()
    states = random_states([mask], layout, dtype)
    for window in (None, 4):
        actual = attend(backend, [mask], states, window=window)
        assert_close(actual[0], naive(mask, states, window=window), dtype)


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("layout", [(4, 4), (4, 2), (8, 1)], ids=str)
def test_eager_has_softcap_and_sinks(
    layout: tuple[int, int], softcap: float | None, with_sinks: bool
) -> None:
    mask = random_plan(3, prefix=5, pending=1, nodes=6).mask()
    states = random_states([mask], layout, torch.float64)
    sinks = torch.linspace(-2, 3, layout[0], dtype=torch.float64) if with_sinks else None
    options: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "scale": 1.3}
    actual = attend(EagerBackend(), [mask], states, window=4, **options)
    assert_close(actual[0], naive(mask, states, window=4, **options), torch.float64)


def test_eager_does_the_softmax_in_float32_or_wider() -> None:
    mask = random_plan(3, prefix=5, pending=1, nodes=6).mask()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        lowered = EagerBackend().lower([mask], window=None, dtype=dtype, device=torch.device("cpu"))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert lowered.dtype == wide
        assert lowered.shape == (1, 1, 1, mask.rows, 5 + mask.rows)


@pytest.mark.parametrize("factor", [4, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sharp_scores_cost_no_accuracy_in_half_precision(
    backend: AttentionBackend, dtype: torch.dtype, factor: int
) -> None:
    """Products that half precision cannot hold, or holds to two digits, decide the softmax."""
    mask = random_plan(3, prefix=40, pending=1, nodes=6).mask()
    query, key, value = random_states([mask], (4, 2), dtype)
    states = (query * factor, key * factor, value)
    assert_close(attend(backend, [mask], states)[0], naive(mask, states), dtype)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"softcap": 30.0}, "backend 'sdpa' cannot do logit softcapping; use backend=eager"),
        ({"sinks": torch.zeros(4)}, "backend 'sdpa' cannot do attention sinks; use backend=eager"),
    ],
    ids=["softcap", "sinks"],
)
def test_sdpa_refuses_what_its_kernel_has_no_argument_for(
    option: dict[str, Any], message: str
) -> None:
    mask = StepPlan(0, (0,)).mask()
    states = random_states([mask], (4, 4), torch.float32)
    with pytest.raises(BackendError) as caught:
        attend(SDPABackend(), [mask], states, **option)
    assert str(caught.value) == message
    assert caught.value.backend == "sdpa"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 63, 600])
def test_sdpa_equals_eager_on_random_trees(prefix: int, dtype: torch.dtype) -> None:
    for seed, layout in enumerate(LAYOUTS):
        plan = random_plan(seed, prefix=prefix, pending=1 + seed % 2, nodes=4 + 8 * seed)
        mask = plan.mask()
        states = random_states([mask], layout, dtype, seed)
        for window in (None, 2, 17, 599, 10_000):
            expected = attend(EagerBackend(), [mask], states, window=window)
            actual = attend(SDPABackend(), [mask], states, window=window)
            assert_close(actual, expected, dtype)


def test_a_ragged_batch_equals_single_runs(backend: AttentionBackend) -> None:
    plans = [
        random_plan(1, prefix=4, pending=1, nodes=7),
        random_plan(2, prefix=0, pending=5, nodes=0),
        random_plan(3, prefix=11, pending=1, nodes=0),
    ]
    masks = [plan.mask() for plan in plans]
    states = random_states(masks, (4, 2), torch.float32)
    for window in (None, 3):
        batch = attend(backend, masks, states, window=window)
        assert bool(torch.isfinite(batch).all())  # padded rows too
        for index, mask in enumerate(masks):
            query, key, value = (state[index : index + 1] for state in states)
            end = mask.prefix + mask.rows
            single = (query[:, :, : mask.rows], key[:, :, :end], value[:, :, :end])
            alone = attend(backend, [mask], single, window=window)
            assert_close(batch[index, : mask.rows], alone[0], torch.float32)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_row_must_not_see_does_not_move_it_at_all(
    backend: AttentionBackend, dtype: torch.dtype, window: int | None
) -> None:
    mask = random_plan(5, prefix=4, pending=2, nodes=9).mask()
    query, key, value = random_states([mask], (4, 2), dtype)
    clean = attend(backend, [mask], (query, key, value), window=window)
    for place in range(mask.prefix + mask.rows):
        poisoned_key, poisoned_value = key.clone(), value.clone()
        poisoned_key[:, :, place] = 1e4
        poisoned_value[:, :, place] = -1e4
        moved = attend(backend, [mask], (query, poisoned_key, poisoned_value), window=window)
        for row in range(mask.rows):
            same = torch.equal(moved[0, row], clean[0, row])
            assert same is not mask.sees(row, place, window=window), (row, place)


def test_a_window_without_end_is_none(backend: AttentionBackend) -> None:
    mask = random_plan(2, prefix=9, pending=1, nodes=5).mask()
    states = random_states([mask], (2, 2), torch.float32)
    full = attend(backend, [mask], states)
    assert torch.equal(attend(backend, [mask], states, window=2**40), full)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(StepPlan(0, (0,) * 9), id="prefill"),
        pytest.param(StepPlan(40, (0,) * 9), id="a chunk"),
        pytest.param(StepPlan(50, (0,)), id="one row"),
        pytest.param(random_plan(4, prefix=50, pending=3, nodes=5), id="a tree"),
    ],
)
def test_states_may_lie_in_memory_in_any_way(backend: AttentionBackend, plan: StepPlan) -> None:
    """Numbers of a row apart, heads innermost, one kv head that stands for two."""
    mask = plan.mask()
    query, key, value = random_states([mask], (6, 2), torch.float32)
    laid = [
        [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (query, key, value)],
        [torch.stack([x, x + 1], dim=-1)[..., 0] for x in (query, key, value)],
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)],
        [query, *(x[:, :1].expand(-1, 2, -1, -1) for x in (key, value))],
    ]
    for window in (None, 6):
        for states in laid:
            plain = tuple(x.contiguous() for x in states)
            actual = attend(backend, [mask], tuple(states), window=window)  # type: ignore[arg-type]
            expected = attend(EagerBackend(), [mask], plain, window=window)  # type: ignore[arg-type]
            assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("layout", [(4, 4), (9, 3)], ids=str)
@pytest.mark.parametrize(
    ("plan", "causal"),
    [
        pytest.param(StepPlan(0, (0,)), False, id="first token"),
        pytest.param(StepPlan(30, (0,)), False, id="one row"),
        pytest.param(StepPlan(0, (0,) * 9), True, id="prefill"),
        pytest.param(StepPlan(0, (0,) * 3, TokenTree.chain([0] * 4)), True, id="prefill and chain"),
    ],
)
def test_sdpa_without_a_mask_equals_sdpa_with_one(
    plan: StepPlan, causal: bool, layout: tuple[int, int]
) -> None:
    mask = plan.mask()
    states = random_states([mask], layout, torch.float32)
    cpu = torch.device("cpu")
    lowered = SDPABackend().lower([mask], window=None, dtype=torch.float32, device=cpu)
    assert lowered.mask is None
    assert lowered.causal is causal
    fast = attend(SDPABackend(), [mask], states)
    # A batch of two always goes by a mask.
    doubled = tuple(state.repeat(2, 1, 1, 1) for state in states)
    lowered = SDPABackend().lower([mask, mask], window=None, dtype=torch.float32, device=cpu)
    assert lowered.mask is not None
    masked = attend(SDPABackend(), [mask, mask], doubled)  # type: ignore[arg-type]
    assert_close(fast[0], masked[0], torch.float32)
    assert_close(fast[0], masked[1], torch.float32)


@pytest.mark.parametrize(
    ("plan", "window"),
    [
        pytest.param(StepPlan(1, (0,) * 3), None, id="a chunk behind a prefix"),
        pytest.param(StepPlan(0, (0,), TokenTree((0, 0), (-1, -1))), None, id="a fork"),
        pytest.param(StepPlan(8, (0,)), 8, id="one row beyond its window"),
        pytest.param(StepPlan(0, (0,) * 9), 8, id="prefill longer than the window"),
    ],
)
def test_sdpa_uses_a_mask_where_the_kernel_alone_would_be_wrong(
    plan: StepPlan, window: int | None
) -> None:
    mask = plan.mask()
    cpu = torch.device("cpu")
    lowered = SDPABackend().lower([mask], window=window, dtype=torch.float32, device=cpu)
    assert lowered.mask is not None
    assert not lowered.causal
    states = random_states([mask], (2, 2), torch.float32)
    actual = attend(SDPABackend(), [mask], states, window=window)
    assert_close(actual[0], naive(mask, states, window=window), torch.float32)


def test_a_window_that_reaches_the_start_needs_no_mask() -> None:
    cpu = torch.device("cpu")
    for plan in (StepPlan(7, (0,)), StepPlan(0, (0,) * 8)):
        lowered = SDPABackend().lower([plan.mask()], window=8, dtype=torch.float32, device=cpu)
        assert lowered.mask is None
