"""The ``triton`` backend: splits, block sizes, compiling for a GPU, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import decodekit.backends.triton
from decodekit import Decoder
from decodekit.backends.eager import EagerBackend
from decodekit.backends.triton import backend as backend_module
from decodekit.backends.triton.backend import TritonBackend, TritonConfig, _splits
from decodekit.backends.triton.tiles import Tile, TileTuner, tiles
from decodekit.errors import BackendError, ConfigError
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree
from tests.support.attention import (
    HALF_AND_SINGLE,
    NEEDS_TRITON,
    assert_close,
    attend,
    random_states,
)
from tests.support.tiny import tiny_model

CPU = torch.device("cpu")
MASK = StepPlan(200, (0,), TokenTree((0, 0, 0), (-1, -1, 1))).mask()


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "decodekit.backends.triton.kernels", raising=False)
    monkeypatch.delattr(decodekit.backends.triton, "kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendError) as caught:
        Decoder.from_model(tiny_model(), backend="triton")
    assert str(caught.value) == (
        "backend 'triton' needs triton: pip install triton; or use backend=sdpa"
    )
    assert caught.value.backend == "triton"


def test_a_negative_number_of_splits_is_refused() -> None:
    with pytest.raises(ConfigError, match="splits must be 0 or more, not -1"):
        TritonConfig(splits=-1)


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("splits", "parts"), [(0, 1), (1, 1), (2, 2), (4, 4), (1000, 7)], ids=lambda number: str(number)
)
def test_splits_change_how_it_is_computed_and_not_what(
    splits: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """204 keys are seven blocks of 32: more splits than that would have nothing to do."""
    backend = TritonBackend(TritonConfig(splits=splits))
    merged: list[int] = []
    kernel = backend._kernels.merge_kernel

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            def run(*arguments: Any, **options: Any) -> None:
                merged.append(arguments[7])
                kernel[grid](*arguments, **options)

            return run

    monkeypatch.setattr(backend._kernels, "merge_kernel", Counted())
    states = random_states([MASK], (4, 2), torch.float32, dim=16)
    sinks = torch.tensor([0.0, 5.0, -3.0, 1.0])
    for window in (None, 20):
        actual = attend(backend, [MASK], states, window=window, sinks=sinks)
        expected = attend(EagerBackend(), [MASK], states, window=window, sinks=sinks)
        assert_close(actual, expected, torch.float32)
    assert merged == ([] if parts == 1 else [parts] * 2)


def test_a_gpu_is_filled_by_splits_of_long_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    cuda = torch.device("cuda")
    assert _splits(100_000, 64, programs=8, device=cuda) == 32  # most
    assert _splits(100_000, 64, programs=16, device=cuda) == 17  # 272 programs on 132 processors
    assert _splits(1024, 64, programs=8, device=cuda) == 4  # four blocks each
    assert _splits(200, 64, programs=8, device=cuda) == 1
    assert _splits(100_000, 64, programs=1000, device=cuda) == 1
    assert _splits(100_000, 64, programs=8, device=CPU) == 1


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_every_tile_gives_the_same_attention(
    dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TritonBackend(TritonConfig(splits=splits))
    states = random_states([MASK], (6, 2), dtype, dim=24)
    for window in (None, 20):
        expected = attend(EagerBackend(), [MASK], states, window=window)
        for tile in tiles(MASK.rows * 3, 24, dtype):
            monkeypatch.setattr(backend_module, "tiles", lambda *_, tile=tile: (tile,))
            assert_close(attend(backend, [MASK], states, window=window), expected, dtype)


@NEEDS_TRITON
def test_tiles_are_tuned_once_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that say something else each time change nothing after the first step of a kind."""
    times = [4.0, 3.0, 2.0, 5.0, 1.0, 2.0, 3.0, 4.0]

    def time_of(run: Any) -> float:
        run()
        return times.pop(0)

    tuner = TileTuner(time_of, ())
    monkeypatch.setattr(backend_module, "_tuner", lambda: tuner)
    states = random_states([MASK], (4, 2), torch.float32, dim=16)
    expected = attend(EagerBackend(), [MASK], states)
    first = attend(TritonBackend(), [MASK], states)
    assert len(times) == 8, "the interpreter tunes nothing"
    backend = TritonBackend()
    lowered = backend.lower([MASK], window=None, dtype=torch.float32, device=CPU)
    monkeypatch.setattr(backend._kernels, "INTERPRETED", False)
    used: list[int] = []
    real = TritonBackend._run

    def watched(self: TritonBackend, tile: Tile, *arguments: Any, **options: Any) -> Any:
        used.append(tile.keys)
        return real(self, tile, *arguments, **options)

    monkeypatch.setattr(TritonBackend, "_run", watched)
    tried = tiles(8, 16, torch.float32)
    untuned = TritonBackend(TritonConfig(tune=False))
    assert torch.equal(untuned.attend(*states, lowered, scale=0.25), first)
    assert used == [tried[0].keys]
    used.clear()
    tuned = [
        each.attend(*states, lowered, scale=0.25) for each in (backend, TritonBackend(), backend)
    ]
    assert used == [*(tile.keys for tile in tried), *[tried[2].keys] * 3]
    for again in tuned:
        assert_close(again, expected, torch.float32)
        assert torch.equal(again, tuned[0])
    backend.attend(*states, lowered, scale=0.25, softcap=3.0)  # a kind of its own
    assert used[-1] == tried[0].keys


def test_kernels_are_launched_on_the_gpu_of_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    backend_module._current(torch.device("cuda", 1))
    with backend_module._current(CPU):
        assert entered == [torch.device("cuda", 1)]


@NEEDS_TRITON
def test_float64_is_refused_when_the_decoder_is_built() -> None:
    with pytest.raises(BackendError, match="float16, bfloat16 and float32, not float64; use back"):
        Decoder.from_model(tiny_model(dtype=torch.float64), backend="triton")


@NEEDS_TRITON
def test_heads_that_are_too_wide_or_uneven_are_refused() -> None:
    query, key, value = random_states([MASK], (2, 2), torch.float32, dim=264)
    with pytest.raises(BackendError, match="heads of up to 256 numbers, not 264; use backend=sdp"):
        attend(TritonBackend(), [MASK], (query, key, value))
    states = query[..., :8], key[..., :8], value[..., :4]
    with pytest.raises(BackendError, match="values as wide as keys, not 4 and 8; use backend=eag"):
        attend(TritonBackend(), [MASK], states)


@NEEDS_TRITON
def test_the_kernels_compile_for_gpus_and_a_cpu_is_refused_then(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(backend_module.__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_triton"],
        cwd=root, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["shared"]) == 4
    assert all(size <= 99 * 1024 for size in found["shared"].values())  # of the smallest GPUs
    assert found["error"] == (
        "backend 'triton' needs a GPU, not cpu; use backend=sdpa, or set TRITON_INTERPRET=1 to run "
        "it in Python, for tests"
    )
