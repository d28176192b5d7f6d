"""Bans texts, whatever tokens they come as.

A token is banned where the text would hold a bad word with it. That is decided on the bytes of the
text that the user gets and not on ids: a word has many tokenizations, and some of its ids mean
another text at another place.

The work of a row does not depend on the vocabulary. Per word a table of tokens is searched when the
processor is made, and for each of its ends when the text first holds what comes before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.decoder.token_bytes import TokenBytes, token_bytes
from decodekit.engine.stop_strings import special_tokens
from decodekit.errors import ConfigError
from decodekit.interfaces.logits import LogitsProcessor

__all__ = ["BannedTexts", "ban_words"]

_SLACK = 8  # tokens that may have no text, or less than a byte's worth


class BannedTexts:
    """Bans the tokens that would complete one of some texts; see ``LogitsProcessor``.

    Args:
        words: The texts, none empty.
        table: What the tokens add to a text.
        vocab_size: V.
        start: Tokens of a prefix that are no part of the text.
        marks: The texts of special tokens that are looked at as if they were in the text.
    """

    def __init__(
        self,
        words: Sequence[str],
        table: TokenBytes,
        *,
        vocab_size: int,
        start: int = 0,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._table = table
        self._size = vocab_size
        self._start = start
        self._marks = {token: text.encode() for token, text in (marks or {}).items()}
        encoded = {word.encode() for word in words}
        self._reach = max(map(len, encoded), default=1) - 1
        # What is missing after each beginning of a word.
        self._missing: dict[bytes, set[bytes]] = defaultdict(set)
        for word in encoded:
            for length in range(1, len(word)):
                self._missing[word[:length]].add(word[length:])
        inside = {token for word in encoded for token in table.holding(word)}
        inside |= {t for t, text in self._marks.items() if any(word in text for word in encoded)}
        starts = table.starts
        first = {t for t, text in starts.items() if any(word in text for word in encoded)}
        self._inside = self._ids(inside)
        self._at_start = self._ids((inside - starts.keys()) | first)
        self._completing: dict[bytes, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        changed = scores.clone()
        for row, tokens in enumerate(input_ids):
            for banned in self._banned(self._text_before(tokens)):
                changed[row, banned.to(scores.device)] = float("-inf")
        return changed

    def _banned(self, text: bytes | None) -> list[Tensor]:
        """Return the tokens that must not follow a text, of which this is the end."""
        if text is None:
            return [self._at_start]
        banned = [self._inside]
        for length in range(1, min(len(text), self._reach) + 1):
            for missing in self._missing.get(text[-length:], ()):
                banned.append(self._tokens_with(missing))
        return banned

    def _tokens_with(self, missing: bytes) -> Tensor:
        """Return the tokens that begin with what is missing of a word."""
        if missing not in self._completing:
            marks = {t for t, text in self._marks.items() if text.startswith(missing)}
            self._completing[missing] = self._ids({*self._table.beginning_with(missing), *marks})
        return self._completing[missing]

    def _text_before(self, tokens: Tensor) -> bytes | None:
        """Return the end of the text of a prefix [L], long enough to hold any beginning.

        None means that there is none yet: the next token will be at its start.
        """
        length = len(tokens)
        count = self._reach + _SLACK
        while True:
            first = max(length - count, self._start)
            text = self._joined(tokens[first:].tolist(), whole=first == self._start)
            if first == self._start or (text is not None and len(text) >= self._reach):
                return text
            count *= 4

    def _joined(self, tokens: Sequence[int], *, whole: bool) -> bytes | None:
        """Return the text of tokens, of all that there are if they are the ``whole``."""
        pieces, known = self._table.pieces, len(self._table.pieces)
        text = [
            (token, self._marks.get(token) or (pieces[token] if token < known else b""))
            for token in tokens
        ]
        text = [one for one in text if one[1]]
        if not text:
            return None
        if whole:
            token, piece = text[0]
            text[0] = token, self._table.starts.get(token, piece)
        return b"".join(piece for _, piece in text)

    def _ids(self, tokens: set[int]) -> Tensor:
        return torch.tensor(sorted(t for t in tokens if t < self._size), dtype=torch.int64)


def ban_words(
    words: Sequence[str], tokenizer: Any, *, vocab_size: int, start: int
) -> list[LogitsProcessor]:
    """Return the processors that keep words out of a text.

    Args:
        words: Texts that must not be produced; those that name special tokens are looked for in
            the text with these tokens in it.
        tokenizer: A ``transformers`` tokenizer.
        vocab_size: V.
        start: Tokens of the prompt that are no part of the text: none of them if the text goes on
            where the prompt ends, else all.

    Raises:
        ConfigError: A word is empty.
    """
    if not all(words):
        message = "a bad word must have a character at least"
        raise ConfigError(message, key="sampling.bad_words", value=list(words))
    table = token_bytes(tokenizer)
    marks = special_tokens(words, tokenizer)
    marked = [word for word in words if any(text in word for text in marks.values())]
    plain = [word for word in words if word not in marked]
    made: list[LogitsProcessor] = []
    if plain:
        made.append(BannedTexts(plain, table, vocab_size=vocab_size, start=start))
    if marked:
        made.append(BannedTexts(marked, table, vocab_size=vocab_size, start=start, marks=marks))
    return made
