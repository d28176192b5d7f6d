"""The ``flash`` backend: which keys go to which part, flash-attn's calls, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import Decoder
from decodekit.backends import flash, flash_kernels
from decodekit.backends.eager import EagerBackend
from decodekit.backends.flash import FlashBackend
from decodekit.errors import BackendError
from decodekit.mask import TreeMask
from decodekit.plan import StepPlan
from decodekit.tree import TokenTree
from tests.attention import assert_close, attend, random_states
from tests.tiny import tiny_model

CPU = torch.device("cpu")
FORK = TokenTree((0, 0, 0), (-1, -1, 1))


class FlashAttn:
    """flash-attn's documented ``flash_attn_with_kvcache`` in plain torch, and a list of its calls.

    Rows end where the keys end; the window is (left, right) of a row's own key; a row that sees
    nothing has an output of 0 and, as in flash-attn 2, a log-sum-exp of plus infinity.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        return_softmax_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        assert return_softmax_lse
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        self.calls.append({"keys": k_cache.shape[1], "causal": causal, "window": window_size})
        groups = q.shape[2] // k_cache.shape[2]
        key, value = (x.float().repeat_interleave(groups, dim=2) for x in (k_cache, v_cache))
        scores = torch.einsum("brhd,bshd->bhrs", q.float(), key) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        rows, keys = scores.shape[2:]
        behind = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
        hidden = torch.zeros_like(behind, dtype=torch.bool)
        if causal:
            hidden |= behind < 0
        if window_size[0] >= 0:
            hidden |= behind > window_size[0]
        if window_size[1] >= 0:
            hidden |= -behind > window_size[1]
        scores = scores.masked_fill(hidden, float("-inf"))
        log = scores.logsumexp(dim=-1)
        weights = scores.softmax(dim=-1).nan_to_num(0.0)
        output = torch.einsum("bhrs,bshd->brhd", weights, value).to(q.dtype)
        return output, log.masked_fill(log == float("-inf"), float("inf"))


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> FlashAttn:
    """Make the backend take a CPU for a GPU with flash-attn."""
    function = FlashAttn()
    monkeypatch.setattr(flash, "select_kernel", lambda _: flash_kernels._CUDA(function))
    return function


def tree(prefix: int, pending: int = 1) -> TreeMask:
    return StepPlan(prefix, (0,) * pending, FORK).mask()


def chain(prefix: int, rows: int) -> TreeMask:
    return StepPlan(prefix, (0,) * rows).mask()


@pytest.mark.parametrize(
    ("mask", "window", "calls"),
    [
        pytest.param(chain(0, 6), None, [(6, True, (-1, -1))], id="prefill"),
        pytest.param(chain(9, 6), None, [(15, True, (-1, -1))], id="a chunk"),
        pytest.param(chain(9, 6), 4, [(9, True, (3, 0))], id="a chunk under a window"),
        pytest.param(chain(9, 1), None, [(10, False, (-1, -1))], id="one row"),
        pytest.param(chain(9, 1), 4, [(4, False, (-1, -1))], id="one row under a window"),
        pytest.param(tree(9), None, [(9, False, (-1, -1))], id="a tree"),
        pytest.param(tree(9), 5, [(2, False, (-1, -1))], id="a tree under a window"),
        pytest.param(tree(9), 2, [], id="a tree whose window leaves no key to all rows"),
        pytest.param(tree(0), None, [], id="a tree without a prefix"),
    ],
)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_flash_attn_is_called_for_what_it_can_do_and_the_rest_is_merged(
    function: FlashAttn,
    mask: TreeMask,
    window: int | None,
    calls: list[tuple[int, bool, tuple[int, int]]],
    softcap: float | None,
    with_sinks: bool,
) -> None:
    states = random_states([mask], (4, 2), torch.float16, dim=16, spare=3)
    sinks = torch.linspace(-2, 3, 4, dtype=torch.float16) if with_sinks else None
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    actual = attend(FlashBackend(), [mask], states, **options)
    assert_close(actual, attend(EagerBackend(), [mask], states, **options), torch.float16)
    assert [(c["keys"], c["causal"], c["window"]) for c in function.calls] == calls


def test_a_ragged_batch_on_flash_attn(function: FlashAttn) -> None:
    masks = [tree(30), chain(0, 7), tree(3, 2), chain(12, 1)]
    states = random_states(masks, (6, 2), torch.bfloat16, dim=8)
    for window in (None, 3, 8, 20):
        actual = attend(FlashBackend(), masks, states, window=window)
        expected = attend(EagerBackend(), masks, states, window=window)
        for index, mask in enumerate(masks):
            pair = actual[index, : mask.rows], expected[index, : mask.rows]
            assert_close(*pair, torch.bfloat16)


@pytest.mark.parametrize(
    ("mask", "window", "runs"),
    [
        # dense, causal, border, tail
        pytest.param(chain(0, 6), None, [0, 6, 0, 0], id="prefill"),
        pytest.param(chain(9, 6), None, [9, 6, 0, 0], id="a chunk"),
        pytest.param(chain(9, 6), 15, [9, 6, 0, 0], id="a window that reaches the start"),
        pytest.param(chain(9, 6), 14, [8, 0, 1, 6], id="a window that does not"),
        pytest.param(chain(9, 1), None, [10, 0, 0, 0], id="one row"),
        pytest.param(tree(9), None, [9, 0, 0, 4], id="a tree"),
        pytest.param(tree(9), 5, [2, 0, 2, 4], id="a tree under a window"),
    ],
)
def test_the_parts_on_a_cpu(mask: TreeMask, window: int | None, runs: list[int]) -> None:
    lowered = FlashBackend().lower([mask], window=window, dtype=torch.float32, device=CPU)
    (span,) = lowered.spans
    found = [span.dense, span.causal, span.border, span.tail]
    assert [end - start for start, end in found] == runs
    assert (span.hidden is not None) == (runs[3] > 0)


def test_softcap_is_refused_on_a_cpu_when_the_decoder_is_built() -> None:
    message = "backend 'flash' cannot do logit softcapping on a CPU; use backend=eager"
    with pytest.raises(BackendError) as caught:
        Decoder.from_model(tiny_model("gemma2"), backend="flash")
    assert str(caught.value) == message
    assert caught.value.backend == "flash"


@pytest.mark.parametrize(
    ("dim", "dtype", "message"),
    [
        (8, torch.float32, "takes float16 or bfloat16 on a GPU, not float32; use dtype=bfloat16"),
        (12, torch.float16, "a multiple of 8, not 12; use backend=sdpa"),
        (264, torch.float16, "up to 256 numbers, a multiple of 8, not 264; use backend=sdpa"),
    ],
)
def test_flash_attn_is_not_given_what_it_does_not_take(
    function: FlashAttn, dim: int, dtype: torch.dtype, message: str
) -> None:
    mask = chain(3, 1)
    with pytest.raises(BackendError, match=message):
        attend(FlashBackend(), [mask], random_states([mask], (2, 2), dtype, dim=dim))


def test_values_of_another_width_are_refused() -> None:
    mask = chain(3, 1)
    query, key, value = random_states([mask], (2, 2), torch.float32, dim=8)
    with pytest.raises(BackendError, match="values as wide as keys, not 4 and 8; use backend=ea"):
        attend(FlashBackend(), [mask], (query, key, value[..., :4]))


def test_a_device_without_a_kernel_is_refused() -> None:
    with pytest.raises(BackendError, match="runs on cuda and cpu, not on meta; use backend=sdpa"):
        FlashBackend().lower(
            [chain(0, 1)], window=None, dtype=torch.float16, device=torch.device("meta")
        )


@pytest.fixture
def _fresh() -> Any:
    flash_kernels._flash_attn.cache_clear()
    yield
    flash_kernels._flash_attn.cache_clear()


@pytest.mark.usefixtures("_fresh")
def test_flash_attn_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendError, match="pip install flash-attn --no-build-isolation; or use"):
        FlashBackend().lower(
            [chain(0, 1)], window=None, dtype=torch.float16, device=torch.device("cuda")
        )


@pytest.mark.usefixtures("_fresh")
def test_flash_attn_3_comes_before_2(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn_interface")}
    for name, module in modules.items():
        module.flash_attn_with_kvcache = name  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    assert flash_kernels._flash_attn() == "flash_attn_interface"
    flash_kernels._flash_attn.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert flash_kernels._flash_attn() == "flash_attn"
