"""What each token adds to the text that a user gets, in bytes.

A token's id says little about its text: the same word has one id after a space and another at the
start of a text, a tokenizer drops the space at the start of a text, and a character may come as
bytes. What is matched against texts is matched against the bytes here.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["TokenBytes", "token_bytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BROKEN = "\ufffd"
_tables: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()
_lock = Lock()


class TokenBytes:
    """The texts of a tokenizer's tokens; those of special tokens are empty.

    Joined, they are the text, but for the first one that is not empty: that is as ``starts`` says.

    Attributes:
        pieces: By token, what it adds inside a text.
        starts: By token, what it adds at the start of a text, where that is something else.
        byte_level: Whether the tokenizer writes each byte as a character, as that of GPT-2 does.
    """

    def __init__(
        self, pieces: Sequence[bytes], starts: dict[int, bytes], *, byte_level: bool
    ) -> None:
        self.pieces = list(pieces)
        self.starts = starts
        self.byte_level = byte_level

    def beginning_with(self, text: bytes) -> list[int]:
        """Return the tokens that add ``text``, which is not empty, and perhaps more after it."""
        order, ordered = self._sorted
        found = []
        for place in range(bisect_left(ordered, text), len(order)):
            if not ordered[place].startswith(text):
                break
            found.append(order[place])
        return found

    def holding(self, text: bytes) -> list[int]:
        """Return the tokens that add ``text``, which is not empty, at any place of theirs."""
        joined, ends = self._joined
        found = []
        place = joined.find(text)
        while place >= 0:
            token = bisect_left(ends, place + 1)  # the token that this byte is of
            if place + len(text) <= ends[token]:
                found.append(token)
                place = joined.find(text, ends[token])
            else:
                place = joined.find(text, place + 1)
        return found

    @cached_property
    def _sorted(self) -> tuple[list[int], list[bytes]]:
        order = sorted(range(len(self.pieces)), key=self.pieces.__getitem__)
        return order, [self.pieces[token] for token in order]

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """All pieces one after the other, and where each ends."""
        ends, total = [], 0
        for piece in self.pieces:
            total += len(piece)
            ends.append(total)
        return b"".join(self.pieces), ends


def token_bytes(tokenizer: Any) -> TokenBytes:
    """Return the table of a tokenizer, made at the first call.

    A vocabulary of 49,152 tokens takes about 0.1 s.

    Args:
        tokenizer: A ``transformers`` tokenizer, or another with ``decode`` and ``len``.
    """
    with _lock:
        try:
            table = _tables.get(tokenizer)
        except TypeError:  # it cannot be a key
            return _made(tokenizer)
        if table is None or len(table.pieces) != _size(tokenizer):  # tokens may have been added
            table = _tables[tokenizer] = _made(tokenizer)
        return table


def _made(tokenizer: Any) -> TokenBytes:
    size = _size(tokenizer)
    inner = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(inner, "decoder", None)
    parts = () if decoder is None else _types(json.loads(decoder.__getstate__()))
    byte_level = "ByteLevel" in parts
    pieces = (_byte_level if byte_level else _in_context)(tokenizer, size)
    spaced = [token for token, piece in enumerate(pieces) if b" " in piece]
    alone = _decoded(tokenizer, [[token] for token in spaced])
    starts = {
        token: text.encode()
        for token, text in zip(spaced, alone, strict=True)
        if _BROKEN not in text and text.encode() != pieces[token]
    }
    return TokenBytes(pieces, starts, byte_level=byte_level)


def _size(tokenizer: Any) -> int:
    """Return the number of ids; some have no token."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    added = () if inner is None else inner.get_added_tokens_decoder()
    return max(len(tokenizer), max(added, default=-1) + 1)


def _types(decoder: Any) -> Iterator[str]:
    """Yield the types of a decoder and of the parts that it is made of."""
    for part in decoder if isinstance(decoder, list) else [decoder]:
        if isinstance(part, dict):
            yield str(part.get("type"))
            yield from _types(part.get("decoders", []))


def _byte_level(tokenizer: Any, size: int) -> list[bytes]:
    """Return the pieces of a tokenizer that writes each byte as a character (GPT-2)."""
    special = set(_special(tokenizer))
    alphabet = _byte_alphabet()
    pieces = []
    for token, text in enumerate(tokenizer.convert_ids_to_tokens(list(range(size)))):
        text = "" if text is None or token in special else text
        known = all(letter in alphabet for letter in text)
        # A token that was added may have letters of other kinds: it is its text.
        pieces.append(bytes(alphabet[letter] for letter in text) if known else text.encode())
    return pieces


def _special(tokenizer: Any) -> Iterator[int]:
    yield from tokenizer.all_special_ids
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.special:
            yield token


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for: its own if it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def _in_context(tokenizer: Any, size: int) -> list[bytes]:
    """Return the pieces of any tokenizer: what each token adds to the text of another."""
    tekken = getattr(getattr(tokenizer, "tokenizer", None), "instruct_tokenizer", None)
    piece_of = getattr(getattr(tekken, "tokenizer", None), "id_to_byte_piece", None)
    if callable(piece_of):  # mistral-common knows the bytes; special tokens have none
        return [piece_of(token) for token in range(size)]
    anchor, before = _anchor(tokenizer, size)
    texts = _decoded(tokenizer, [[*anchor, token] for token in range(size)])
    pieces = [
        text[len(before) :].encode() if text.startswith(before) else text.encode() for text in texts
    ]
    names = getattr(tokenizer, "convert_ids_to_tokens", None)
    for token, name in enumerate(names(list(range(size))) if callable(names) else ()):
        byte = _BYTE_TOKEN.fullmatch(name) if isinstance(name, str) else None
        if byte and pieces[token] != name.encode():
            pieces[token] = bytes([int(byte[1], 16)])
    return pieces


def _anchor(tokenizer: Any, size: int) -> tuple[list[int], str]:
    """Return a token with a text that another can follow, and that text."""
    for token in range(size - 1, -1, -1):
        (text,) = _decoded(tokenizer, [[token]])
        if text.isascii() and text.isalnum():
            return [token], text
    return [], ""


def _decoded(tokenizer: Any, runs: list[list[int]]) -> list[str]:
    """Return the texts of runs of tokens, without special ones."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:
        texts: list[str] = inner.decode_batch(runs, skip_special_tokens=True)
        return texts
    return [
        tokenizer.decode(run, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for run in runs
    ]
