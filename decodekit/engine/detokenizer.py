"""From tokens to text, one token at a time: nothing broken is shown, nothing is shown twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from decodekit.engine.stop_strings import StopStrings, special_tokens
from decodekit.errors import ConfigError

__all__ = ["IncrementalText", "Tokenizer", "context_of"]

_BROKEN = "\ufffd"  # what a tokenizer puts for bytes that are not a whole character yet
_MAX_HELD = 16  # tokens that wait at most; what is broken by then is broken for good
_LEAST_CONTEXT = 4
_MAX_PARTS = 3  # bytes, and so tokens at most, of a character that is not whole yet


class Tokenizer(Protocol):
    """The one method of a ``transformers`` tokenizer that incremental decoding needs."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of ``token_ids``."""
        ...


class IncrementalText:
    """The text of a growing run of tokens, cut before the first stop string.

    ``text`` is all that is certain. ``take`` returns the part that can be shown already: a
    character whose bytes have not all come waits, and so does text that may turn out to be the
    start of a stop string or that of tokens that ``hold`` names. All that ``take`` ever returned,
    joined, is the final ``text``.

    Stop strings are looked for in the text. Those that name special tokens are looked for in the
    text with these tokens in it, whether or not they are shown. ``stop_tokens`` are those that are
    a stop string by themselves.

    Args:
        tokenizer: Decodes tokens.
        stop: Strings that end the text.
        context: Tokens before the first one, so that a tokenizer that drops the space at the start
            of a text keeps it here.
        undo: Most tokens that ``drop`` will be asked to take back.
        skip_special_tokens: Whether special tokens are left out of the text.
        include_stop: Whether the stop string that ends the text is its end.

    Raises:
        ConfigError: A stop string is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        undo: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        if any(not string for string in stop):
            raise ConfigError("a stop string must not be empty", key="stop", value=list(stop))
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._include_stop = include_stop
        special = special_tokens(stop, tokenizer)
        self.stop_tokens = frozenset(token for token, text in special.items() if text in stop)
        # Those that the text has not, but a stop string.
        self._special = special if skip_special_tokens else {}
        marked = [
            string for string in stop if any(text in string for text in self._special.values())
        ]
        self._stops = StopStrings(string for string in stop if string not in marked)
        self._marked_stops = StopStrings(marked)
        self._marked = _MarkedText()
        self._shown = 0
        # Tokens of the last stretch that ended on a whole character, then those after it: decoding
        # both and taking the difference keeps spaces right at the seam.
        self._seam = list(context)
        self._new: list[int] = []
        # Those of the last special token that was marked, and where the text of these ends.
        self._marked_new: list[int] | None = None
        self._broken_end = 0
        self._last_mark: int | None = None
        self._on_hold = 0
        self._skipped: dict[
            int, bool
        ] = {}  # by token, whether it is a special one that is left out
        # The state before each of the last tokens.
        self._before: deque[_State] = deque(maxlen=undo)

    def push(self, token: int) -> bool:
        """Add a token; return True if a stop string is now complete, and cut the text before it."""
        self._before.append(_State(len(self.text), len(self._marked.text), self._seam, self._new))
        if token in self._special and self._stops_at(token):
            return True
        waiting = self._new
        self._new = [*waiting, token]
        before = self._decode(self._seam)
        after = self._decode(self._seam + self._new)
        if len(after) > len(before) and not after.endswith(_BROKEN):
            self._append(after[len(before) :], marked=self._after_a_mark())
            self._seam, self._new = self._new, []
        elif self._is_skipped(token):
            self._new = waiting  # else those in a row would be decoded again with each one
        elif after.endswith(_BROKEN):
            self._give_up_on(before, after)
        return self.stopped

    def _stops_at(self, token: int) -> bool:
        """Take in a special token that a stop string names; return whether the text ends here."""
        # Bytes that wait for others stand before it, and if the text ends here they stay broken.
        broken = self._decode(self._seam + self._new)[len(self._decode(self._seam)) :]
        known = len(self._marked.text)
        if self._new is self._marked_new:  # they stand before another such token already
            self._marked.mark(self._special[token])
        else:
            self._marked.mark(broken + self._special[token])
            self._marked_new, self._broken_end = self._new, known + len(broken)
        self._last_mark = token
        hit = self._marked_stops.find(self._marked.text, known=known)
        if hit is not None and not self.stopped:
            place = self._marked.unmarked(hit[0])
            if place == len(self.text) and hit[0] >= self._broken_end:
                self.text += broken
            else:
                self.text = self.text[:place]
            self.text += hit[1] if self._include_stop else ""
            self.stopped = True
        return self.stopped

    def _is_skipped(self, token: int) -> bool:
        """Return whether a token is a special one that the text has not."""
        known = self._skipped.get(token)
        if known is None:
            shown = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            known = self._skips and bool(shown) and not self._decode([token])
            self._skipped[token] = known
        return known

    def _give_up_on(self, before: str, after: str) -> None:
        """Take broken text for what it is if it has waited too long, but for its last bytes."""
        if len(self._new) < _MAX_HELD:
            return
        for parts in range(_MAX_PARTS, 0, -1):
            head = self._decode(self._seam + self._new[:-parts])
            # Otherwise the cut would go through a character, whole or not.
            if len(head) < len(after) and after.startswith(head):
                self._append(head[len(before) :])
                self._seam, self._new = self._new[:-parts], self._new[-parts:]
                return

    def hold(self, count: int) -> None:
        """Do not show the text of the last ``count`` tokens yet: they may be dropped."""
        self._on_hold = count

    def drop(self, count: int) -> None:
        """Take back the text of the last ``count`` tokens, at most ``undo``."""
        state = self._before[-count]
        self._seam, self._new = state.seam, state.new
        self.text = self.text[: state.length]
        self._marked.cut(state.marked)

    def finish(self) -> None:
        """Take in what was waiting for more bytes; no token follows."""
        if self._new and not self.stopped:
            before = self._decode(self._seam)
            self._append(self._decode(self._seam + self._new)[len(before) :])
            self._new = []
        self._stops = self._marked_stops = StopStrings(())  # nothing can become a stop any more
        self._on_hold = 0

    def take(self) -> str:
        """Return the text that has become certain since the last call; may be empty."""
        end = len(self.text)
        if not self.stopped:
            end -= self._stops.held(self.text)
            marked = self._marked.text
            end = min(end, self._marked.unmarked(len(marked) - self._marked_stops.held(marked)))
            if self._on_hold:
                end = min(end, self._before[-self._on_hold].length)
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is before the text so far: a tokenizer may drop the space there."""
        return not self.text and not self._decode(self._seam)

    @property
    def shown(self) -> str:
        """All that ``take`` has returned."""
        return self.text[: self._shown]

    def _after_a_mark(self) -> str | None:
        """Return the text of the new tokens behind a special one that begins the text.

        A tokenizer that drops the space at the start of a text keeps it there. None where the text
        with special tokens goes on like the one without.
        """
        if self.text or self._seam or self._last_mark is None:
            return None
        name = self._special[self._last_mark]
        text = self._tokenizer.decode(
            [self._last_mark, *self._new],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text[len(name) :] if text.startswith(name) else None

    def _append(self, piece: str, *, marked: str | None = None) -> None:
        known, known_marked = len(self.text), len(self._marked.text)
        self.text += piece
        if marked is not None and marked.endswith(piece):
            self._marked.mark(marked[: len(marked) - len(piece)])
        self._marked.text += piece
        self._look_for_stops(known, known_marked)

    def _look_for_stops(self, known: int, marked: int) -> None:
        """Cut the text if a stop string is complete; nothing was in the characters known before."""
        if self.stopped:
            return
        found = [self._stops.find(self.text, known=known)]
        hit = self._marked_stops.find(self._marked.text, known=marked)
        found.append(hit and (self._marked.unmarked(hit[0]), hit[1]))
        first = min((hit for hit in found if hit), key=lambda hit: hit[0], default=None)
        if first is not None:
            place, string = first
            self.text = self.text[:place] + (string if self._include_stop else "")
            self.stopped = True

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        # Cleaning up would take back characters that have been shown.
        return self._tokenizer.decode(
            tokens, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False
        )


class _State(NamedTuple):
    """What there is before a token: the lengths of both texts, the seam and the tokens after it."""

    length: int
    marked: int
    seam: list[int]
    new: list[int]


class _MarkedText:
    """A text with the special tokens in it that stop strings name."""

    def __init__(self) -> None:
        self.text = ""
        self._marks: list[tuple[int, int]] = []  # where each begins and ends

    def mark(self, text: str) -> None:
        """Add the text of a special token."""
        self._marks.append((len(self.text), len(self.text) + len(text)))
        self.text += text

    def cut(self, length: int) -> None:
        """Drop all but the first characters; no mark is cut in two."""
        self.text = self.text[:length]
        self._marks = [mark for mark in self._marks if mark[1] <= length]

    def unmarked(self, place: int) -> int:
        """Return a place of this text as one of the text without special tokens."""
        return place - sum(min(end, place) - start for start, end in self._marks if start < place)


def context_of(prompt: Sequence[int], tokenizer: Tokenizer | None) -> Sequence[int]:
    """Return the last tokens of a prompt, as many as it takes to decode what follows them.

    Args:
        prompt: Token ids.
        tokenizer: Decodes them; None if nothing is decoded.

    Returns:
        Tokens that have a text and do not begin inside a character; all of them if there is no
        such end.
    """
    count = _LEAST_CONTEXT
    while tokenizer is not None and count < len(prompt):
        text = tokenizer.decode(prompt[-count:], skip_special_tokens=True)
        if text and not text.startswith(_BROKEN):
            break
        count *= 2
    return prompt[-count:]
