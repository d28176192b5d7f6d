"""From what a caller calls a prompt to token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from decodekit.errors import GenerationError

__all__ = ["Prompt", "as_token", "encode_prompt", "is_batch"]

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]] | Any"
"""Text, token ids (a sequence, or a tensor of one prompt), or chat messages
(``[{"role": "user", "content": "..."}]``)."""


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


def encode_prompt(
    prompt: Prompt,
    tokenizer: Any,
    *,
    chat: bool,
    vocab_size: int,
    max_positions: int | None = None,
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        prompt: Text, token ids or chat messages.
        tokenizer: A ``transformers`` tokenizer; None if there is none and ids are given.
        chat: Whether text is wrapped in the chat template as one message of the user.
        vocab_size: V; ids must be below it.
        max_positions: Positions that the model has; None if there is no limit.

    Raises:
        GenerationError: The prompt is empty or leaves no room for an answer, an id is out of range,
            or there is no tokenizer or no chat template for what was given.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer, chat=chat)
    else:
        items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(items, (bytes, bytearray, Mapping)) or not isinstance(items, Sequence):
            hint = "; give its input_ids" if isinstance(items, Mapping) else ""
            raise GenerationError(
                f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}{hint}"
            )
        items = list(items)
        if hasattr(prompt, "tolist") and len(items) == 1 and isinstance(items[0], list):
            items = items[0]  # a tensor [1, L], as tokenizers return it
        if items and all(isinstance(item, Mapping) for item in items):
            ids = _apply_template(items, tokenizer)
        else:
            ids = [_token_id(item) for item in items]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise GenerationError(
                f"token id {token} is outside the vocabulary, 0 .. {vocab_size - 1}"
            )
    if not ids:
        raise GenerationError("the prompt is empty; give some text or at least one token id")
    if max_positions is not None and len(ids) >= max_positions:
        raise GenerationError(
            f"the prompt has {len(ids)} tokens and the model's context is {max_positions}; "
            "shorten the prompt to leave room for an answer (model.max_positions sets another)"
        )
    return ids


def _encode_text(text: str, tokenizer: Any, *, chat: bool) -> list[int]:
    if tokenizer is None:
        raise GenerationError("a text prompt needs a tokenizer; give token ids or a tokenizer")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GenerationError("the prompt is not valid Unicode text") from error
    if chat:
        if not text.strip():
            raise GenerationError("the prompt is empty; give some text")
        return _apply_template([{"role": "user", "content": text}], tokenizer)
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _apply_template(messages: list[Any], tokenizer: Any) -> list[int]:
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        raise GenerationError(
            "the model has no chat template; give the prompt as text with chat=false"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise GenerationError(f"the chat template refuses the messages: {error}") from error
    # The template writes the special tokens itself.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


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
