"""Stop strings in a growing text, and the special tokens that they name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["StopStrings", "special_tokens"]


class StopStrings:
    """Finds the strings that end a text.

    Args:
        strings: None of them is empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)

    def find(self, text: str, *, known: int) -> tuple[int, str] | None:
        """Return the place and the string that begins first, the shortest of several there.

        Args:
            text: The text so far.
            known: Characters in which nothing was found before.
        """
        start = max(known - self._longest + 1, 0)
        found = [(text.find(string, start), string) for string in self._strings]
        return min(
            (hit for hit in found if hit[0] >= 0),
            key=lambda hit: (hit[0], len(hit[1])),
            default=None,
        )

    def held(self, text: str) -> int:
        """Return how many characters at the end of ``text`` may be the start of a string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0


def special_tokens(strings: Sequence[str], tokenizer: Any) -> dict[int, str]:
    """Return the special tokens whose whole text is in one of ``strings``, with their texts.

    Args:
        strings: Texts in which they may be named.
        tokenizer: A ``transformers`` tokenizer.
    """
    found = {}
    for token in set(_candidates(strings, tokenizer)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if not tokenizer.decode([token], skip_special_tokens=True) and any(
            text and text in string for string in strings
        ):
            found[token] = str(text)
    return found


def _candidates(strings: Sequence[str], tokenizer: Any) -> Iterator[int]:
    if not strings:
        return
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not isinstance(added, Mapping):  # that of mistral-common has a method instead
        added = {}
    ids, texts = (getattr(tokenizer, f"all_special_{kind}", ()) for kind in ("ids", "tokens"))
    for token, text in [*added.items(), *zip(ids, texts, strict=False)]:
        if any(str(text) in string for string in strings):
            yield token
