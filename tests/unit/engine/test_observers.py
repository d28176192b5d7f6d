"""Step observers: what they are told, and that they cannot harm a text."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from decodekit import Decoder
from decodekit.config.plugins.installed import installed
from decodekit.engine.observers import Observer, Observers
from decodekit.interfaces.events import StepEvent
from tests.support.fakes import Given, OracleProposer, ToyAdapter, plain_decode

PROMPT = [1, 2, 3]


@pytest.fixture
def observe(monkeypatch: pytest.MonkeyPatch) -> Any:
    def listen(*functions: Any) -> None:
        found = [Observer(f"plugin{index}", one) for index, one in enumerate(functions)]
        monkeypatch.setattr(installed(), "observers", found)

    return listen


def oracle(adapter: ToyAdapter) -> Decoder:
    text = [*PROMPT, *plain_decode(ToyAdapter(), PROMPT, max_new_tokens=60)]
    return Decoder(adapter, strategy=Given(lambda: OracleProposer(text, depth=3)))


def test_every_step_of_every_sequence_is_told(observe: Any) -> None:
    events: list[StepEvent] = []
    observe(events.append)
    decoder = oracle(ToyAdapter())
    result = decoder.generate(PROMPT, max_new_tokens=10)
    assert [event.step for event in events] == [0, 1, 2]
    assert [(event.nodes, event.accepted) for event in events] == [(3, 3), (3, 3), (3, 2)]
    assert [token for event in events for token in event.tokens] == result.tokens
    assert [event.finish_reason for event in events] == [None, None, "length"]
    assert sum(event.forward_seconds for event in events) == result.stats.forward_seconds
    assert {event.sequence for event in events} == {0}
    first = events[0].request
    events.clear()
    decoder.generate([PROMPT, PROMPT], max_new_tokens=6)
    assert [(event.sequence, event.step) for event in events] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len({event.request for event in events} | {first}) == 2


def test_the_reader_is_first_and_a_step_with_which_it_leaves_is_told(observe: Any) -> None:
    events: list[StepEvent] = []
    observe(events.append)
    stream = oracle(ToyAdapter()).stream(PROMPT, max_new_tokens=20)
    next(stream)
    assert events == []
    next(stream)
    assert [event.step for event in events] == [0]
    stream.close()
    assert [event.step for event in events] == [0, 1]


def test_an_observer_that_raises_loses_no_text_and_is_named_once(
    observe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    events: list[StepEvent] = []

    def broken(event: StepEvent) -> None:
        calls.append(event.step)
        if event.step == 1:
            raise ValueError("disk full")

    observe(broken, events.append)
    decoder = oracle(ToyAdapter())
    expected = plain_decode(ToyAdapter(), PROMPT, max_new_tokens=20)
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected
    assert calls == [0, 1]
    assert [event.step for event in events] == [0, 1, 2, 3, 4]  # the other one goes on
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("decodekit.plugins", logging.ERROR)
    assert record.getMessage() == (
        "plugin 'plugin0' failed in decodekit_step_finished at step 1 and is not told of further "
        "steps of this request: ValueError: disk full"
    )
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected
    assert calls == [0, 1, 0, 1]  # the next request begins anew


def test_an_observer_that_exits_loses_no_text_either(
    observe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def exits(event: StepEvent) -> None:
        raise SystemExit("two\nlines")

    observe(exits)
    expected = plain_decode(ToyAdapter(), PROMPT, max_new_tokens=9)
    assert oracle(ToyAdapter()).generate(PROMPT, max_new_tokens=9).tokens == expected
    (record,) = caplog.records
    assert record.getMessage().endswith("SystemExit: two lines")


def test_nothing_is_made_for_nobody(observe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodekit.engine.loop.StepEvent", None)  # calling it would fail
    assert not Observers()
    observe()
    assert len(oracle(ToyAdapter()).generate(PROMPT, max_new_tokens=9).tokens) == 9
    observe(print)
    with pytest.raises(TypeError):
        oracle(ToyAdapter()).generate(PROMPT, max_new_tokens=9)
