"""The laws of an n-gram pool."""

from __future__ import annotations

from collections.abc import Callable

from decodekit.interfaces.strategy import NGramPool
from decodekit.testing.laws import law

__all__ = ["check_pool"]


def check_pool(new_pool: Callable[..., NGramPool], *, newest_first: bool = True) -> None:
    """Check a pool: bounded, without duplicates, its own.

    Args:
        new_pool: Called as ``new_pool(per_key=..., max_keys=...)``; returns an empty pool.
        newest_first: Whether ``lookup`` returns the continuation that was inserted last first. A
            pool with another order says which in its documentation.

    Raises:
        AssertionError: A law is broken; which, and on what input.
    """
    pool = new_pool(per_key=3, max_keys=4)
    law(isinstance(pool, NGramPool), "a pool has insert and lookup", f"got {pool!r}")
    found = pool.lookup(1)
    law(found == [], "an unknown key has an empty list", f"lookup(1) is {found!r}")
    given, run = [5, 6, 7, 8], (5, 6, 7, 8)
    pool.insert(1, given)
    given.append(9)
    found = pool.lookup(1)
    law(found == [run], "an insert is found whole, as a tuple", f"insert(1, {run}) gives {found!r}")
    for power in range(1, 18):
        found = pool.lookup(1 + 2**power)
        law(found == [], "keys are told apart", f"after insert(1, ...) lookup({1 + 2**power})")
    found = pool.lookup(1)
    law(found == [run], "a lookup drops no key", f"after lookups of other keys it is {found!r}")
    found.clear()
    again = pool.lookup(1)
    law(again == [run], "what lookup returns is the caller's", f"cleared, it is {again!r}")
    _check_one_key(new_pool, newest_first=newest_first)
    _check_keys(new_pool)
    one, other = new_pool(per_key=2, max_keys=2), new_pool(per_key=2, max_keys=2)
    one.insert(1, (5,))
    found = other.lookup(1)
    law(found == [], "pools do not share what they hold", f"another pool's insert shows: {found!r}")


def _check_one_key(new_pool: Callable[..., NGramPool], *, newest_first: bool) -> None:
    for per_key in (0, 1, 3):
        pool = new_pool(per_key=per_key, max_keys=4)
        for number in range(20):
            run = (number // 2 % 4, 0)  # each one twice, and again later
            pool.insert(1, run)
            found = pool.lookup(1)
            where = f"per_key={per_key}, after insert {number} of {run}, lookup is {found!r}"
            law(len(found) <= per_key, "a key holds at most per_key continuations", where)
            law(len(set(found)) == len(found), "a continuation is held once", where)
            law(per_key == 0 or run in found, "the newest continuation is held", where)
            if per_key and newest_first:
                law(found[0] == run, "the newest continuation comes first", where)
        if newest_first and per_key == 3:
            found, expected = pool.lookup(1), [(1, 0), (0, 0), (3, 0)]
            law(found == expected, "newest first", f"lookup is {found!r}, not {expected!r}")


def _check_keys(new_pool: Callable[..., NGramPool]) -> None:
    for max_keys in (1, 3):
        pool = new_pool(per_key=2, max_keys=max_keys)
        for key in range(max_keys):
            pool.insert(key, (key,))
        pool.insert(0, (9,))
        held = [key for key in range(max_keys) if pool.lookup(key)]
        law(
            held == list(range(max_keys)),
            "an insert under a held key drops no other key",
            f"max_keys={max_keys}, held: {held}",
        )
        pool = new_pool(per_key=2, max_keys=max_keys)
        for key in range(25):
            pool.insert(key, (key, key + 1))
            where = f"max_keys={max_keys}, {key + 1} keys were inserted"
            newest = pool.lookup(key)
            law(newest == [(key, key + 1)], "the newest key is held", f"{where}; it has {newest!r}")
            held = [other for other in range(key + 1) if pool.lookup(other)]
            law(len(held) <= max_keys, "at most max_keys keys are held", f"{where}, held: {held}")
