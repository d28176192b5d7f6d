"""Which tiles the ``triton`` backend tries, and how it remembers the fastest; needs no triton."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread

import pytest
import torch

from decodekit.backends.triton.tiles import Tile, TileTuner, bucket_of_keys, bucket_of_pairs, tiles

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRIED = (Tile(16, 64, 4, 2), Tile(16, 64, 4, 3), Tile(16, 128, 4, 2))


class TooLargeError(Exception):
    """What a GPU says of a tile that does not fit."""


class Clock:
    """Says how long calls take, one number after the other; None for a tile that does not fit."""

    def __init__(self, *times: float | None) -> None:
        self.times = list(times)
        self.ran: list[Tile] = []

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        time = self.times.pop(0)
        if time is None:
            raise TooLargeError
        return time

    def best(self, tuner: TileTuner, kind: str = "a step") -> Tile:
        return tuner.best(kind, TRIED, self.ran.append)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_are_few_different_and_what_a_product_takes(dtype: torch.dtype) -> None:
    for width in (8, 64, 80, 128, 256):
        for pairs in (1, 4, 17, 120, 5000):
            tried = tiles(pairs, width, dtype)
            assert len(tried) == len(set(tried)) == 4
            for tile in tried:
                for size in (tile.pairs, tile.keys):
                    assert size >= 16
                    assert size & (size - 1) == 0


def test_steps_of_one_kind_try_the_same_tiles() -> None:
    for dtype in DTYPES:
        for width in (64, 256):
            by_bucket: dict[int, tuple[Tile, ...]] = {}
            for pairs in range(1, 3000):
                tried = tiles(pairs, width, dtype)
                assert by_bucket.setdefault(bucket_of_pairs(pairs), tried) == tried
            assert len(by_bucket) == 8


def test_buckets_are_few_and_do_not_fall() -> None:
    assert [bucket_of_pairs(n) for n in (1, 16, 17, 32, 33, 1024, 1025, 9999)] == [
        4, 4, 5, 5, 6, 10, 11, 11,
    ]  # fmt: skip
    assert [bucket_of_keys(n) for n in (1, 255, 256, 1023, 1024, 4095, 4096)] == [
        4, 4, 5, 5, 6, 6, 7,
    ]  # fmt: skip


def test_the_fastest_is_found_once_and_remembered() -> None:
    clock = Clock(3.0, 2.0, 1.0)
    tuner = TileTuner(clock, (TooLargeError,))
    assert clock.best(tuner) == TRIED[2]
    assert clock.ran == list(TRIED)
    assert clock.best(tuner) == TRIED[2]  # another measurement would have no number left
    clock.times = [1.0, 2.0, 3.0]
    assert clock.best(tuner, "another step") == TRIED[0]
    assert clock.best(tuner) == TRIED[2]


@pytest.mark.parametrize(
    ("times", "place"),
    [
        pytest.param((1.04, 1.0, 1.01), 0, id="all about as fast"),
        pytest.param((1.2, 1.03, 1.0), 1, id="two about as fast"),
        pytest.param((None, 2.0, 1.0), 2, id="one does not fit"),
        pytest.param((None, 1.0, None), 1, id="one fits"),
        pytest.param((None, None, None), 0, id="none fits"),
    ],
)
def test_chance_and_refusals_do_not_decide(times: tuple[float | None, ...], place: int) -> None:
    clock = Clock(*times)
    assert clock.best(TileTuner(clock, (TooLargeError,))) == TRIED[place]


def test_another_error_is_not_hidden() -> None:
    def broken(run: Callable[[], object]) -> float:
        raise ValueError("a defect")

    tuner = TileTuner(broken, (TooLargeError,))
    for _ in range(2):  # nothing is remembered, or locked
        with pytest.raises(ValueError, match="a defect"):
            tuner.best("a step", TRIED, print)


def test_threads_agree() -> None:
    clock = Clock(*(float(number) for number in (3, 2, 1, 1, 2, 3, 1, 2, 3)))
    tuner = TileTuner(clock, (TooLargeError,))
    start, found = Barrier(3), []

    def ask() -> None:
        start.wait()
        found.append(clock.best(tuner))

    threads = [Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [TRIED[2]] * 3
    assert len(clock.ran) == 3
