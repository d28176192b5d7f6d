"""The ``flash`` backend: which keys go to which part, flash-attn's calls, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree
from tests.support.attention import assert_close, attend, random_states
from tests.support.tiny import tiny_model

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


class FlashAttn4(FlashAttn):
    """The same of flash-attn 4's ``flash_attn_func``, whose log of nothing is minus infinity."""

    def __call__(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, num_splits: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        output, log = super().__call__(q, k, v, return_softmax_lse=return_lse, **options)
        self.calls[-1]["splits"] = num_splits
        return output, log.masked_fill(log == float("inf"), float("-inf"))


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


@pytest.mark.parametrize(("major", "splits"), [(9, 1), (10, 0)])
def test_flash_attn_4_is_called_by_its_own_names(
    monkeypatch: pytest.MonkeyPatch, major: int, splits: int
) -> None:
    function = FlashAttn4()
    kernel = flash_kernels._CUDA4(function, major)
    monkeypatch.setattr(flash, "select_kernel", lambda _: kernel)
    masks = [tree(30), chain(0, 7), tree(3, 2), chain(12, 1)]
    states = random_states(masks, (6, 2), torch.bfloat16, dim=8)
    for window in (None, 3, 20):
        for softcap in (None, 2.0):
            options: dict[str, Any] = {"window": window, "softcap": softcap}
            actual = attend(FlashBackend(), masks, states, **options)
            expected = attend(EagerBackend(), masks, states, **options)
            for index, mask in enumerate(masks):
                pair = actual[index, : mask.rows], expected[index, : mask.rows]
                assert_close(*pair, torch.bfloat16)
    assert {call["splits"] for call in function.calls} == {splits}


@pytest.mark.parametrize(("major", "refused"), [(9, False), (10, True), (11, True)])
def test_flash_attn_4_has_fewer_widths_on_blackwell(major: int, refused: bool) -> None:
    kernel = flash_kernels._CUDA4(FlashAttn4(), major)
    for width in (64, 128, 136, 192, 256):
        states = torch.zeros(1, 1, 1, width, dtype=torch.float16)
        if refused and 128 < width < 256:
            with pytest.raises(BackendError, match=f"on this GPU, not {width}; use backend=sdpa"):
                kernel.check(states, states)
        else:
            kernel.check(states, states)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that makes it look as if just these versions of flash-attn were there."""
    names = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}

    def cute(q: Tensor, *, return_lse: bool = False) -> str:
        return "4"

    def install(*versions: int) -> None:
        flash_kernels._cuda_kernel.cache_clear()
        for version, name in names.items():
            module = ModuleType(name)
            module.flash_attn_with_kvcache = str(version)  # type: ignore[attr-defined]
            module.flash_attn_func = cute  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module if version in versions else None)
        if 4 in versions and 2 not in versions:  # the folder that 4 is in, and nothing else
            monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))

    yield install
    flash_kernels._cuda_kernel.cache_clear()


@pytest.mark.parametrize(
    ("installed", "major", "taken"),
    [
        ((2, 3, 4), 8, 2),
        ((2, 3, 4), 9, 3),
        ((2, 4), 9, 2),
        ((4,), 9, 4),
        ((2, 3, 4), 10, 4),
        ((2, 3), 10, 2),
        ((2, 4), 12, 2),
        ((3, 4), 8, None),
        ((3,), 10, None),
        ((), 9, None),
    ],
    ids=str,
)
def test_the_flash_attn_that_suits_the_gpu_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    packages: Callable[..., None],
    installed: tuple[int, ...],
    major: int,
    taken: int | None,
) -> None:
    packages(*installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    if taken is None:
        with pytest.raises(BackendError, match="pip install flash-attn --no-build-isolation; or u"):
            flash_kernels.select_kernel(torch.device("cuda"))
        return
    kernel = flash_kernels.select_kernel(torch.device("cuda"))
    assert isinstance(kernel, flash_kernels._CUDA4) is (taken == 4)
    assert taken == 4 or kernel._function == str(taken)  # type: ignore[attr-defined]


def test_a_flash_attn_4_that_returns_no_logs_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, packages: Callable[..., None]
) -> None:
    packages(4)
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", lambda q: q)
    with pytest.raises(BackendError, match="early flash-attn 4 returns no log-sum-exp"):
        flash_kernels._cuda_kernel(10)
