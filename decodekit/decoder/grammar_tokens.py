"""The tokens that a grammar deals with, and the tables that ``llguidance`` makes of them.

Where a tokenizer writes each byte as a character, the library reads the tokens itself. Of others it
is given the bytes, and after them once more those that are another text at the start of a text.

Shapes: V vocabulary, N tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from decodekit.decoder.token_bytes import token_bytes
from decodekit.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["GrammarTokens", "grammar_tokens", "reason_of"]

# By tokenizer, then by kind, the token that the library takes for the end of the text, and the
# number of tokens: some may have been added since.
_tables: WeakKeyDictionary[Any, dict[tuple[str, int, int], LLTokenizer]] = WeakKeyDictionary()
_tables_lock = Lock()


@dataclass(frozen=True)
class GrammarTokens:
    """The token ids that a constraint deals with.

    Attributes:
        size: V.
        texts: Ids from here on are not in the tokenizer, or not in V.
        ends: The end-of-text tokens, all below V.
        starts: By token, the id under which the library has it at the start of a text, where it is
            another text there.
        blank: Tokens that are no text at the start of a text.
    """

    size: int
    texts: int
    ends: tuple[int, ...]
    starts: Mapping[int, int] = field(default_factory=dict)
    blank: frozenset[int] = frozenset()

    @property
    def starting(self) -> NDArray[np.int64]:
        """The tokens of ``starts``, [N]."""
        return self._arrays[0]

    @property
    def starting_as(self) -> NDArray[np.int64]:
        """The ids of ``starts``, [N]."""
        return self._arrays[1]

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.array([*self.starts], np.int64), np.array([*self.starts.values()], np.int64)


def grammar_tokens(
    tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int], *, fresh: bool
) -> tuple[LLTokenizer, GrammarTokens]:
    """Return the library's table of a tokenizer, made at the first call, and the tokens in it.

    Args:
        tokenizer: A fast ``transformers`` tokenizer. Its special tokens are never text.
        vocab_size: V, the number of the model's logits.
        eos_token_ids: The model's end-of-text tokens.
        fresh: Whether the generated text is a text of its own, and does not follow another.

    Raises:
        ConfigError: There is no end-of-text token, or the library cannot use the tokenizer.
    """
    ends = tuple(sorted(end for end in set(eos_token_ids) if 0 <= end < vocab_size))
    if not ends:
        raise ConfigError(
            "a constraint needs an end-of-text token, and this model has none", key="constraint"
        )
    table = _table(tokenizer, ends[0])
    texts = min(table.vocab_size, vocab_size)
    known = token_bytes(tokenizer)
    if known.byte_level and not known.starts:
        return table, GrammarTokens(vocab_size, texts, ends)
    # The library reads the space of some other tokenizers as a letter.
    table = _own_table(tokenizer, ends[0])
    if not fresh:
        return table, GrammarTokens(vocab_size, texts, ends)
    written = [token for token, text in known.starts.items() if text]
    starts = {token: id_ for id_, token in enumerate(written, len(known.pieces)) if token < texts}
    blank = frozenset(t for t, text in known.starts.items() if not text and t < texts)
    return table, GrammarTokens(vocab_size, texts, ends, starts, blank)


def _table(tokenizer: Any, end: int) -> LLTokenizer:
    """Return the library's own table.

    Args:
        tokenizer: As the caller gave it.
        end: What the library takes for the end of the text. Never one of the tokens that are text
            for us, since the library would allow it in both roles.

    Raises:
        ConfigError: The library cannot use the tokenizer.
    """
    from llguidance.hf import from_tokenizer

    reason = "it is not a fast tokenizer of transformers"
    if getattr(tokenizer, "is_fast", False):
        try:
            return _kept(
                tokenizer, "library", end, lambda: from_tokenizer(tokenizer, eos_token=end)
            )
        except ValueError as error:
            reason = reason_of(str(error))
    message = f"this tokenizer cannot be used for a constraint: {reason}"
    raise ConfigError(message, key="constraint", value=type(tokenizer).__name__)


def _own_table(tokenizer: Any, end: int) -> LLTokenizer:
    """Return a table of the tokens' texts, and after them those that differ at a text's start."""
    from llguidance import LLTokenizer, TokenizerWrapper

    def make() -> LLTokenizer:
        known = token_bytes(tokenizer)
        tokens = [*known.pieces, *(text for text in known.starts.values() if text)]
        return LLTokenizer(TokenizerWrapper(_TokenList(tokens, end)), eos_token=end)

    return _kept(tokenizer, "own", end, make)


class _TokenList:
    """Tokens as the library takes them: by their bytes.

    Args:
        tokens: The bytes of each; a token without any is never allowed.
        end: The end of the text.
    """

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = [end]

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text: of none, since no text is forced."""
        return []


def _kept(tokenizer: Any, kind: str, end: int, make: Callable[[], LLTokenizer]) -> LLTokenizer:
    key = (kind, end, len(token_bytes(tokenizer).pieces))
    with _tables_lock:
        tables = _tables.setdefault(tokenizer, {})
        if key not in tables:
            tables[key] = make()
        return tables[key]


def reason_of(error: str) -> str:
    """Return an error of the library as one line, without the grammar that was made here."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    # Lines of a frame: "   2 | start: /(/" and "   ^^^".
    lines = [line for line in error.splitlines() if not re.match(r" +(\d+ \||\^+$)", line)]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    place = r'at \d+\(\d+\): (invalid regex ".*" \(in regex\): |failed to compile JSON schema: )?'
    return re.sub("^" + place, "", " ".join(" ".join(lines).split()))
