"""When a text ends, and the one place where an accepted run is cut.

The rules are asked about each token in order, before the cache, the history, the stream or a
counter sees it. Most bugs of speculative decoders are a second place where this is done.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from decodekit.errors import require_at_least
from decodekit.text import IncrementalText

__all__ = ["FinishReason", "StopRules", "cut_run"]

FinishReason = Literal["eos", "stop", "length", "capacity", "cancelled"]
"""Why a text ended: an end-of-text token, a stop string, ``max_new_tokens``, the model's last
position, or the caller."""


class StopRules:
    """The rules of one request, and how much of it has been produced.

    Where several rules fire at one token, the first of this order is the reason: an end-of-text
    token, a stop string, ``max_new_tokens``, the model's last position.

    Args:
        max_new_tokens: Most tokens to produce, 0 or more.
        room: Tokens for which the model has positions; None for no limit.
        eos_token_ids: Any of these ends the text and is its last token.
        text: The text so far, with its stop strings; None if only tokens are wanted.

    Raises:
        ConfigError: ``max_new_tokens`` is negative.
    """

    def __init__(
        self,
        *,
        max_new_tokens: int,
        room: int | None = None,
        eos_token_ids: Set[int] = frozenset(),
        text: IncrementalText | None = None,
    ) -> None:
        require_at_least(max_new_tokens, 0, key="max_new_tokens")
        self.produced = 0
        self.finish_reason: FinishReason | None = None
        self._eos = eos_token_ids
        self._text = text
        fits = room is None or room >= max_new_tokens
        self._limit = max_new_tokens if room is None or fits else room
        self._limit_reason: FinishReason = "length" if fits else "capacity"
        if self._limit == 0:
            self.finish_reason = self._limit_reason

    @property
    def remaining(self) -> int:
        """Tokens that may still be produced."""
        return self._limit - self.produced

    def push(self, token: int) -> FinishReason | None:
        """Take in the next token; return the reason if the text ends with it."""
        self.produced += 1
        last = token in self._eos or self.remaining == 0
        stopped = False
        if self._text is not None:
            stopped = self._text.push(token)
            if last:
                self._text.finish()
                stopped = self._text.stopped
        if token in self._eos:
            self.finish_reason = "eos"
        elif stopped:
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = self._limit_reason
        return self.finish_reason


def cut_run(tokens: tuple[int, ...], rules: StopRules) -> tuple[int, ...]:
    """Return ``tokens`` up to and including the one that ends the text, if one does.

    This is the only place where an accepted run is shortened.
    """
    for count, token in enumerate(tokens, start=1):
        if rules.push(token) is not None:
            return tokens[:count]
    return tokens
