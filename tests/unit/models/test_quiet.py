"""transformers is silent inside and as before outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import utils
from transformers.utils import logging as _logging

from decodekit.models.quiet import quiet_transformers

hub: Any = utils
logging: Any = _logging


def state() -> tuple[int, bool, bool]:
    return (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        not hub.are_progress_bars_disabled(),
    )


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = state()
    yield
    logging.set_verbosity(before[0])
    (logging.enable_progress_bar if before[1] else logging.disable_progress_bar)()
    (hub.enable_progress_bars if before[2] else hub.disable_progress_bars)()


@pytest.mark.parametrize("verbosity", [10, 30])
@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize("hub_bars", [True, False])
def test_settings_are_restored_after_an_error(verbosity: int, bars: bool, hub_bars: bool) -> None:
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
    (hub.enable_progress_bars if hub_bars else hub.disable_progress_bars)()
    before = state()
    inside: list[tuple[int, bool, bool]] = []

    def fail() -> None:
        with quiet_transformers():
            inside.append(state())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [(40, False, False)]
    assert state() == before


def test_bars_can_stay() -> None:
    logging.enable_progress_bar()
    with quiet_transformers(bars=True, gguf=True):
        assert state() == (40, True, True)
    assert logging.is_progress_bar_enabled()


def test_the_bar_of_gguf_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    original = reader.tqdm
    with quiet_transformers(gguf=True):
        assert list(reader.tqdm(range(3), desc="x")) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    assert reader.tqdm is original


def test_two_threads_do_not_keep_each_others_silence() -> None:
    before = state()
    inside = threading.Event()
    leave = threading.Event()

    def first() -> None:
        with quiet_transformers():
            inside.set()
            leave.wait(10)

    def second() -> None:
        with quiet_transformers():
            pass

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(10)
    assert state() == before
