"""When a text ends, why, and that a run is cut exactly there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decodekit.engine.detokenizer import IncrementalText
from decodekit.engine.stopping import StopRules
from decodekit.errors import ConfigError
from tests.support.fakes import ByteTokenizer, cut

LETTERS = ByteTokenizer([bytes([byte]) for byte in b"abcdefghij"], special=[9])
EOS = 9


def rules(max_new_tokens: int = 8, stop: Sequence[str] = (), **options: object) -> StopRules:
    text = IncrementalText(LETTERS, stop=stop)
    return StopRules(max_new_tokens=max_new_tokens, text=text, **options)  # type: ignore[arg-type]


def test_nothing_ends_the_text_before_its_time() -> None:
    fresh = rules(3)
    assert (fresh.finish_reason, fresh.remaining, len(fresh.tokens)) == (None, 3, 0)
    assert fresh.push(0) is None
    assert (fresh.finish_reason, fresh.remaining, len(fresh.tokens)) == (None, 2, 1)


@pytest.mark.parametrize("eos", [5, 7, 9])
def test_any_of_several_tokens_ends_the_text(eos: int) -> None:
    some = StopRules(max_new_tokens=8, eos_token_ids=frozenset({5, 7, 9}))
    assert cut((1, 2, eos, 3), some) == (1, 2, eos)
    assert some.finish_reason == "eos"
    assert len(some.tokens) == 3


def test_a_stop_string_ends_the_text_at_the_token_that_completes_it() -> None:
    some = rules(stop=["cd"])
    assert cut((0, 1, 2), some) == (0, 1, 2)
    assert some.finish_reason is None
    assert cut((3, 4), some) == (3,)
    assert some.finish_reason == "stop"


@pytest.mark.parametrize("budget", range(7))
@pytest.mark.parametrize("split", range(7))
def test_every_budget_gives_exactly_that_many_tokens(budget: int, split: int) -> None:
    tokens = (0, 1, 2, 3, 4, 5)
    some = rules(budget)
    kept: tuple[int, ...] = ()
    for run in (tokens[:split], tokens[split:]):
        if some.finish_reason is None:
            kept += cut(run, some)
    assert kept == tokens[:budget]
    assert some.finish_reason == ("length" if budget <= 6 else None)
    assert some.remaining == 0


def test_a_budget_of_no_tokens_is_finished_before_it_begins() -> None:
    assert rules(0).finish_reason == "length"
    assert rules(0, room=0).finish_reason == "length"


@pytest.mark.parametrize(
    ("max_new_tokens", "room", "produced", "reason"),
    [
        (4, None, 4, "length"),
        (4, 5, 4, "length"),
        (4, 4, 4, "length"),
        (4, 3, 3, "capacity"),
        (4, 0, 0, "capacity"),
    ],
)
def test_the_models_last_position_ends_the_text_only_if_it_comes_first(
    max_new_tokens: int, room: int | None, produced: int, reason: str
) -> None:
    some = rules(max_new_tokens, room=room)
    assert some.remaining == produced
    kept = cut((0, 1, 2, 3, 4, 5), some) if some.finish_reason is None else ()
    assert len(kept) == len(some.tokens) == produced
    assert some.finish_reason == reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        # At the third token, "c", all of these would fire; the first in this order is the reason.
        ({"eos_token_ids": {2}, "stop": ["bc"], "max_new_tokens": 3, "room": 3}, "eos"),
        ({"stop": ["bc"], "max_new_tokens": 3, "room": 3}, "stop"),
        ({"max_new_tokens": 3, "room": 3}, "length"),
        ({"max_new_tokens": 4, "room": 3}, "capacity"),
        ({"eos_token_ids": {2}, "max_new_tokens": 4, "room": 3}, "eos"),
        ({"stop": ["bc"], "max_new_tokens": 4, "room": 3}, "stop"),
    ],
)
def test_where_several_rules_fire_the_first_is_the_reason(
    options: dict[str, object], reason: str
) -> None:
    some = rules(**options)  # type: ignore[arg-type]
    assert cut((0, 1, 2, 3), some) == (0, 1, 2)
    assert some.finish_reason == reason


@pytest.mark.parametrize(
    ("run", "kept", "reason"),
    [
        ((0, EOS, 2, 3), (0, EOS), "eos"),  # before the stop string is complete
        ((0, 2, 3, EOS), (0, 2, 3), "stop"),
        ((0, 0, 0, 0, 2, 3, EOS), (0, 0, 0, 0, 2), "length"),
    ],
)
def test_the_rule_that_fires_at_the_earlier_token_wins(
    run: tuple[int, ...], kept: tuple[int, ...], reason: str
) -> None:
    some = rules(5, stop=["cd"], eos_token_ids={EOS})
    assert cut(run, some) == kept
    assert some.finish_reason == reason


def test_a_run_that_ends_nothing_is_kept_whole() -> None:
    some = rules(8)
    assert cut((), some) == ()
    assert cut((0, 1), some) == (0, 1)
    assert some.finish_reason is None
    assert len(some.tokens) == 2


def test_without_a_text_only_tokens_count() -> None:
    some = StopRules(max_new_tokens=2, eos_token_ids={EOS})
    assert cut((0, 1, 2), some) == (0, 1)
    assert some.finish_reason == "length"


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        StopRules(max_new_tokens=-1)
    assert str(caught.value) == "max_new_tokens must be 0 or more, not -1"
    assert (caught.value.key, caught.value.value) == ("max_new_tokens", -1)
