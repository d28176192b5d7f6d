"""The sequence breakers of DRY, which a user writes as texts, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decodekit.decoder.token_bytes import token_bytes

__all__ = ["breaker_tokens"]


def breaker_tokens(texts: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """Return the tokens whose text holds one of some texts, or that such a text ends with.

    Special tokens count by their names.

    Args:
        texts: The sequence breakers, none empty.
        tokenizer: A ``transformers`` tokenizer.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None)
    names = added if isinstance(added, Mapping) else {}  # that of mistral-common has a method
    table = token_bytes(tokenizer)
    found: set[int] = set()
    for text in texts:
        found.update(table.holding(text.encode()))
        found.update(token for token, name in names.items() if text in str(name))
        # Of a text that is in no token: the last token of its own, inside a text.
        found.update(tokenizer(f"a{text}", add_special_tokens=False)["input_ids"][-1:])
    return frozenset(found)
