"""``check_pool``: the built-in pool passes, and each law catches a pool that breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from decodekit.strategies.lookahead.pool import RecentNGramPool
from decodekit.testing import check_pool


def test_the_built_in_pool_keeps_every_law() -> None:
    check_pool(RecentNGramPool)


class Oldest(RecentNGramPool):
    def lookup(self, key: int) -> list[tuple[int, ...]]:
        return super().lookup(key)[::-1]


class NoneForUnknown(RecentNGramPool):
    def lookup(self, key: int) -> Any:
        return super().lookup(key) or None


class Growing:
    """Bounded in nothing."""

    def __init__(self, **sizes: int) -> None:
        self.held: dict[int, list[Any]] = {}

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        self.held.setdefault(key, []).insert(0, tuple(continuation))

    def lookup(self, key: int) -> list[Any]:
        return list(self.held.get(key, []))


class Lists(Growing):
    def insert(self, key: int, continuation: Any) -> None:
        self.held.setdefault(key, []).insert(0, continuation)


class Inner(Growing):
    def lookup(self, key: int) -> list[Any]:
        return self.held.get(key, [])


class Doubles(Growing):
    def __init__(self, *, per_key: int, max_keys: int) -> None:
        super().__init__()
        self.per_key = per_key

    def lookup(self, key: int) -> list[Any]:
        return super().lookup(key)[: self.per_key]


class ManyKeys(RecentNGramPool):
    def __init__(self, *, per_key: int, max_keys: int) -> None:
        super().__init__(per_key=per_key, max_keys=max_keys + 1)


class Full(RecentNGramPool):
    """Takes nothing new once it is full."""

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        if key in self._entries or len(self._entries) < self.max_keys:
            super().insert(key, continuation)


class Stubborn(RecentNGramPool):
    """Takes no further continuation once a key is full."""

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        if len(self.lookup(key)) < self.per_key:
            super().insert(key, continuation)


class Short(RecentNGramPool):
    """Keeps the first two tokens of a continuation."""

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        super().insert(key, continuation[:2])


class Hashed(RecentNGramPool):
    """Takes keys that end alike for one."""

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        super().insert(key % 1024, continuation)

    def lookup(self, key: int) -> list[tuple[int, ...]]:
        return super().lookup(key % 1024)


class Asked(RecentNGramPool):
    """Makes room for a key that is only asked for."""

    def lookup(self, key: int) -> list[tuple[int, ...]]:
        if key not in self._entries:
            self.insert(key, (0,))
            self._entries[key].clear()
        return super().lookup(key)


class Hasty(RecentNGramPool):
    """Makes room before it looks whether it needs any."""

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        if len(self._entries) == self.max_keys:
            del self._entries[next(reversed(self._entries))]
        super().insert(key, continuation)


_shared: dict[int, list[Any]] = {}


class Shared(RecentNGramPool):
    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        if sizes == {"per_key": 2, "max_keys": 2}:
            self._entries = _shared  # type: ignore[assignment]

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        if self._entries is _shared:
            _shared[key] = [tuple(continuation)]
        else:
            super().insert(key, continuation)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (dict, "a pool has insert and lookup"),
        (NoneForUnknown, "an unknown key has an empty list"),
        (Lists, "an insert is found whole, as a tuple"),
        (Short, "an insert is found whole, as a tuple"),
        (Hashed, "keys are told apart"),
        (Hasty, "an insert under a held key drops no other key"),
        (Asked, "a lookup drops no key"),
        (Inner, "what lookup returns is the caller's"),
        (Growing, "a key holds at most per_key continuations"),
        (Doubles, "a continuation is held once"),
        (Oldest, "the newest continuation comes first"),
        (Stubborn, "the newest continuation is held"),
        (ManyKeys, "at most max_keys keys are held"),
        (Full, "the newest key is held"),
        (Shared, "pools do not share what they hold"),
    ],
)
def test_a_broken_pool_is_caught_by_the_law_that_it_breaks(broken: Any, expected: str) -> None:
    with pytest.raises(AssertionError, match=f"^broken law: {expected}; "):
        check_pool(broken)


def test_another_order_is_allowed_where_it_is_said() -> None:
    check_pool(Oldest, newest_first=False)
