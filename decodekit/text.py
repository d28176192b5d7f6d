"""From tokens to text, one token at a time: nothing broken is shown, nothing is shown twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from decodekit.errors import ConfigError

__all__ = ["IncrementalText", "Tokenizer"]

_BROKEN = "\ufffd"  # what a tokenizer puts for bytes that are not a whole character yet
_MAX_HELD = 16  # tokens that wait at most; what is broken by then is broken for good
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

    Args:
        tokenizer: Decodes tokens.
        stop: Strings that end the text; they are not part of it.
        context: Tokens before the first one, so that a tokenizer that drops the space at the start
            of a text keeps it here.
        undo: Most tokens that ``drop`` will be asked to take back.

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
    ) -> None:
        if any(not string for string in stop):
            raise ConfigError("a stop string must not be empty", key="stop", value=list(stop))
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max((len(string) for string in stop), default=0)
        self._shown = 0
        # Tokens of the last stretch that ended on a whole character, then those after it: decoding
        # both and taking the difference keeps spaces right at the seam.
        self._seam = list(context)
        self._new: list[int] = []
        self._on_hold = 0
        # What was there before each of the last tokens: the text's length, the seam, the new ones.
        self._before: deque[tuple[int, list[int], list[int]]] = deque(maxlen=undo)

    def push(self, token: int) -> bool:
        """Add a token; return True if a stop string is now complete, and cut the text before it."""
        self._before.append((len(self.text), self._seam, self._new))
        self._new = [*self._new, token]
        before = self._decode(self._seam)
        after = self._decode(self._seam + self._new)
        if after.endswith(_BROKEN):
            self._give_up_on(before, after)
        elif len(after) > len(before):
            self._append(after[len(before) :])
            self._seam, self._new = self._new, []
        return self.stopped

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
        length, self._seam, self._new = self._before[-count]
        self.text = self.text[:length]

    def finish(self) -> None:
        """Take in what was waiting for more bytes; no token follows."""
        if self._new and not self.stopped:
            before = self._decode(self._seam)
            self._append(self._decode(self._seam + self._new)[len(before) :])
            self._new = []
        self._longest = self._on_hold = 0  # nothing can become a stop any more

    def take(self) -> str:
        """Return the text that has become certain since the last call; may be empty."""
        end = len(self.text) if self.stopped else len(self.text) - self._held()
        if self._on_hold and not self.stopped:
            end = min(end, self._before[-self._on_hold][0])
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    @property
    def shown(self) -> str:
        """All that ``take`` has returned."""
        return self.text[: self._shown]

    def _append(self, piece: str) -> None:
        start = max(len(self.text) - self._longest + 1, 0)
        self.text += piece
        found = [self.text.find(string, start) for string in self._stop]
        cut = min((place for place in found if place >= 0), default=None)
        if cut is not None:
            self.text = self.text[:cut]
            self.stopped = True

    def _held(self) -> int:
        """Return how many characters at the end may be the start of a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(string.startswith(tail) for string in self._stop):
                return length
        return 0

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        # Cleaning up would take back characters that have been shown.
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
