"""Pools of n-grams: the memory from which lookahead draws its candidates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from decodekit.errors import require_at_least

__all__ = ["RecentNGramPool", "RecentPoolConfig"]


@dataclass(kw_only=True)
class RecentPoolConfig:
    """Settings of the pool ``recent``; see ``RecentNGramPool``."""

    name: str = "recent"
    per_key: int = 7
    max_keys: int = 65_536


class RecentNGramPool:
    """A bounded pool that returns the continuations seen last, newest first.

    A key holds at most ``per_key`` distinct continuations; one that is seen again moves to the
    front. When more than ``max_keys`` keys are held, the key that was written least recently is
    dropped, so memory stays below ``max_keys * per_key`` continuations for as long as the process
    lives. (The reference implementation keys its pool by one token in the same way; Fu et al.,
    2024, section 3.2.)

    Args:
        per_key: Continuations kept for a key, G in the paper; 0 keeps nothing.
        max_keys: Keys kept in all.

    Raises:
        ConfigError: A size is out of its range.
    """

    def __init__(self, *, per_key: int, max_keys: int = 65_536) -> None:
        require_at_least(per_key, 0, key="per_key")
        require_at_least(max_keys, 1, key="max_keys")
        self.per_key = per_key
        self.max_keys = max_keys
        self._entries: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of continuations held."""
        return sum(len(entry) for entry in self._entries.values())

    def insert(self, key: int, continuation: Sequence[int]) -> None:
        """Remember that ``continuation`` followed the token ``key``."""
        if self.per_key == 0:
            return
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = OrderedDict()
        run = tuple(continuation)
        entry[run] = None
        entry.move_to_end(run)
        if len(entry) > self.per_key:
            entry.popitem(last=False)
        self._entries.move_to_end(key)
        if len(self._entries) > self.max_keys:
            self._entries.popitem(last=False)

    def lookup(self, key: int) -> list[tuple[int, ...]]:
        """Return the continuations of ``key``, newest first; an empty list if there are none."""
        entry = self._entries.get(key)
        return list(reversed(entry)) if entry is not None else []

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
