"""The pool of n-grams: newest first, bounded, least recently written goes first."""

from __future__ import annotations

import pytest

from decodekit.errors import ConfigError
from decodekit.interfaces import NGramPool
from decodekit.strategies.lookahead.pool import RecentNGramPool, RecentPoolConfig


def test_the_newest_continuation_comes_first() -> None:
    pool = RecentNGramPool(per_key=3)
    for run in ((1, 2), (3, 4), (5, 6)):
        pool.insert(9, run)
    assert pool.lookup(9) == [(5, 6), (3, 4), (1, 2)]
    assert len(pool) == 3


def test_an_unknown_key_has_no_continuations() -> None:
    pool = RecentNGramPool(per_key=3)
    assert pool.lookup(9) == []
    assert len(pool) == 0  # looking does not make an entry


def test_a_continuation_seen_again_moves_to_the_front_and_is_held_once() -> None:
    pool = RecentNGramPool(per_key=3)
    for run in ((1,), (2,), (3,), (1,)):
        pool.insert(9, run)
    assert pool.lookup(9) == [(1,), (3,), (2,)]


def test_the_oldest_continuation_of_a_full_key_goes() -> None:
    pool = RecentNGramPool(per_key=2)
    for run in ((1,), (2,), (1,), (3,)):  # (1,) was seen again, so (2,) is the oldest
        pool.insert(9, run)
    assert pool.lookup(9) == [(3,), (1,)]


def test_the_key_written_least_recently_goes() -> None:
    pool = RecentNGramPool(per_key=2, max_keys=2)
    pool.insert(1, (10,))
    pool.insert(2, (20,))
    pool.insert(1, (11,))
    assert pool.lookup(2) == [(20,)]  # reading does not count as writing
    pool.insert(3, (30,))
    assert pool.lookup(1) == [(11,), (10,)]
    assert pool.lookup(2) == []
    assert pool.lookup(3) == [(30,)]


def test_memory_is_bounded_however_much_is_inserted() -> None:
    pool = RecentNGramPool(per_key=3, max_keys=5)
    for number in range(1000):
        pool.insert(number // 10 % 13, (number,))
        assert len(pool) <= 15
    assert len(pool) == 15
    assert sum(bool(pool.lookup(key)) for key in range(13)) == 5


def test_no_continuations_per_key_keeps_nothing() -> None:
    pool = RecentNGramPool(per_key=0)
    pool.insert(1, (2,))
    assert pool.lookup(1) == []
    assert len(pool) == 0


def test_what_is_looked_up_is_a_copy() -> None:
    pool = RecentNGramPool(per_key=2)
    run = [2, 3]
    pool.insert(1, run)
    run.append(4)
    pool.lookup(1).clear()
    assert pool.lookup(1) == [(2, 3)]


def test_clear_forgets_everything() -> None:
    pool = RecentNGramPool(per_key=2)
    pool.insert(1, (2,))
    pool.clear()
    assert len(pool) == 0
    assert pool.lookup(1) == []


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"per_key": -1}, "per_key", "per_key must be 0 or more, not -1"),
        ({"per_key": 1, "max_keys": 0}, "max_keys", "max_keys must be 1 or more, not 0"),
    ],
)
def test_a_size_out_of_range_is_refused(settings: dict[str, int], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RecentNGramPool(**settings)
    assert str(caught.value) == message
    assert (caught.value.key, caught.value.value) == (key, settings[key])


def test_it_is_an_ngram_pool_with_the_defaults_of_its_settings() -> None:
    config = RecentPoolConfig()
    pool = RecentNGramPool(per_key=config.per_key)
    assert isinstance(pool, NGramPool)
    assert pool.max_keys == config.max_keys == 65_536
