"""From what a caller calls a prompt to token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from decodekit.decoder.chat import ChatOptions, apply_template, is_continued
from decodekit.errors import GenerationError

__all__ = [
    "EncodedPrompt",
    "Prompt",
    "as_token",
    "encode_prompt",
    "is_batch",
    "uses_template",
]

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]] | Any"
"""Text, token ids (a sequence, or a tensor of one prompt), or chat messages
(``[{"role": "user", "content": "..."}]``)."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The tokens of a prompt, and how an answer follows them.

    Attributes:
        tokens: Token ids, at least one.
        fresh: Whether the answer is a text of its own, as after messages; otherwise its text goes
            on where the prompt's ends.
    """

    tokens: list[int]
    fresh: bool


_PLAIN = ChatOptions()
_NOTHING: Mapping[str, Any] = {}


def is_batch(prompt: Any) -> bool:
    """Return whether ``prompt`` is a list of prompts: texts, lists, tensors or requests.

    A list of numbers is one prompt of token ids, a list of mappings one chat.
    """
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return False
    first = prompt[0]
    return (
        isinstance(first, (str, list, tuple))
        or getattr(first, "ndim", 0) > 0
        or hasattr(first, "prompt")
    )


def uses_template(prompt: Prompt, tokenizer: Any, *, asked: bool | None, default: bool) -> bool:
    """Return whether text goes through the chat template.

    Args:
        prompt: Text, or anything else.
        tokenizer: A ``transformers`` tokenizer, or None.
        asked: What the request says; None if it does not.
        default: What the decoder says. Text that begins with the token that begins a text comes
            from a template already.
    """
    if asked is not None:
        return asked
    begin = getattr(tokenizer, "bos_token", None)
    templated = isinstance(prompt, str) and bool(begin) and prompt.startswith(str(begin))
    return default and not templated


def encode_prompt(
    prompt: Prompt,
    tokenizer: Any,
    *,
    chat: bool,
    vocab_size: int,
    max_positions: int | None = None,
    room: int = 1,
    options: ChatOptions = _PLAIN,
    template_defaults: Mapping[str, Any] = _NOTHING,
) -> EncodedPrompt:
    """Return the token ids of a prompt.

    Args:
        prompt: Text, token ids or chat messages.
        tokenizer: A ``transformers`` tokenizer; None if there is none and ids are given.
        chat: Whether text is wrapped in the chat template as one message of the user.
        vocab_size: V; ids must be below it.
        max_positions: Positions that the model has; None if there is no limit.
        room: How many of them an answer needs at least: 0 or 1.
        options: How messages are rendered.
        template_defaults: Variables of the chat template that ``options`` may override.

    Raises:
        ConfigError: ``options`` asks for something, and there are no messages.
        GenerationError: The prompt is empty or leaves no room for an answer, an id is out of range,
            or there is no tokenizer or no chat template for what was given.
    """
    messages = _messages_of(prompt, tokenizer, chat=chat)
    if messages is not None:
        ids = apply_template(messages, tokenizer, options.over(template_defaults))
        fresh = not is_continued(messages, options)
    else:
        options.require_unused()
        fresh = False
        if isinstance(prompt, str):
            ids = _encode_text(prompt, tokenizer)
        else:
            ids = [_token_id(item) for item in _items_of(prompt)]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise GenerationError(
                f"token id {token} is outside the vocabulary, 0 .. {vocab_size - 1}"
            )
    if not ids:
        raise GenerationError("the prompt is empty; give some text or at least one token id")
    if max_positions is not None and len(ids) + room > max_positions:
        why = " to leave room for an answer" if room else ""
        raise GenerationError(
            f"the prompt has {len(ids)} tokens and the model's context is {max_positions}; "
            f"shorten the prompt{why} (model.max_positions sets another)"
        )
    return EncodedPrompt(ids, fresh)


def _messages_of(prompt: Prompt, tokenizer: Any, *, chat: bool) -> list[Any] | None:
    """Return a prompt as chat messages; None if it is none."""
    if isinstance(prompt, str):
        _check_text(prompt, tokenizer)
        if not chat:
            return None
        if not prompt.strip():
            raise GenerationError("the prompt is empty; give some text")
        return [{"role": "user", "content": prompt}]
    items = _items_of(prompt)
    return items if items and all(isinstance(item, Mapping) for item in items) else None


def _items_of(prompt: Prompt) -> list[Any]:
    """Return token ids or messages as a list."""
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(items, (bytes, bytearray, Mapping)) or not isinstance(items, Sequence):
        hint = "; give its input_ids" if isinstance(items, Mapping) else ""
        raise GenerationError(
            f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}{hint}"
        )
    items = list(items)
    if hasattr(prompt, "tolist") and len(items) == 1 and isinstance(items[0], list):
        return items[0]  # a tensor [1, L], as tokenizers return it
    return items


def _check_text(text: str, tokenizer: Any) -> None:
    if tokenizer is None:
        raise GenerationError("a text prompt needs a tokenizer; give token ids or a tokenizer")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GenerationError("the prompt is not valid Unicode text") from error


def _encode_text(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of plain text, with what the tokenizer puts in front only once."""
    ids: list[int] = tokenizer(text)["input_ids"]
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    added = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), 0)
    # Text from a template has these tokens already.
    return ids[added:] if plain[:added] == ids[:added] else ids


def as_token(item: Any) -> int:
    """Return a token id as an int; integers of other libraries are taken too.

    Raises:
        TypeError: It is no whole number.
    """
    if isinstance(item, bool):
        raise TypeError("a truth value is no token id")
    return operator.index(item)


def _token_id(item: Any) -> int:
    try:
        return as_token(item)
    except TypeError:
        raise GenerationError(
            f"a prompt is text, token ids or chat messages; it holds {item!r:.80}"
        ) from None
