"""Prompts as tokenizers return them, padded to one length: the padding is taken off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decodekit.errors import ConfigError, GenerationError, shortened

__all__ = ["take_prompt", "without_padding"]

_MASK = "attention_mask"


def take_prompt(prompt: Any, options: dict[str, Any]) -> Any:
    """Return the prompt of a request without padding.

    Args:
        prompt: Any prompt or prompts, or None.
        options: The request's; ``input_ids``, ``attention_mask`` and ``token_type_ids`` are taken
            out, as in ``generate(**tokenizer(texts, return_tensors="pt", padding=True))``.

    Raises:
        ConfigError: There is no prompt, or two.
        GenerationError: The mask does not fit the prompt.
    """
    ids = options.pop("input_ids", None)
    mask = options.pop(_MASK, None)
    _require_no_types(options.pop("token_type_ids", None))
    if (prompt is None) == (ids is None):
        what = "a prompt" if prompt is None else "a prompt or input_ids, not both"
        raise ConfigError(f"give {what}", key="prompt")
    return without_padding(ids if prompt is None else prompt, mask)


def without_padding(prompt: Any, attention_mask: Any = None) -> Any:
    """Return prompts of token ids without what the mask leaves out, on their left or right.

    Args:
        prompt: Any prompt or prompts. With a mask: token ids, one prompt or several. A mapping, as
            a tokenizer returns it, brings its mask along.
        attention_mask: 1 or True at the tokens of a prompt and 0 at the padding, shaped like the
            ids; None where there is none.

    Returns:
        A list of prompts for ids of several, and for a nested list; else one prompt.

    Raises:
        GenerationError: The mask has another shape or other numbers, or a hole.
    """
    if isinstance(prompt, (list, tuple)) and prompt and all(map(_is_tokenized, prompt)):
        return [without_padding(each) for each in prompt]
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"input_ids", _MASK, "token_type_ids"}
        if "input_ids" not in prompt or unknown:
            raise GenerationError(
                "a prompt is text, token ids or chat messages; a mapping has input_ids and "
                f"attention_mask, not {shortened(sorted(map(str, unknown or prompt)))}"
            )
        _require_no_types(prompt.get("token_type_ids"))
        own = prompt.get(_MASK)
        attention_mask = own if attention_mask is None else attention_mask
        prompt = prompt["input_ids"]
    ids = _plain(prompt)
    nested = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    one = hasattr(prompt, "tolist") and nested and len(ids) == 1  # a tensor [1, L] is one prompt
    if attention_mask is None:
        return ids if hasattr(prompt, "tolist") and nested and not one else prompt
    if not isinstance(ids, (list, tuple)) or not all(
        isinstance(row, (list, tuple) if nested else int) for row in ids
    ):
        raise GenerationError(f"attention_mask goes with token ids, not with {shortened(prompt)}")
    mask = _plain(attention_mask)
    if one and mask and isinstance(mask, list) and not isinstance(mask[0], list):
        mask = [mask]
    rows, masks = (ids, mask) if nested else ([ids], [mask])
    if _shape(rows) != _shape(masks):
        raise GenerationError(
            f"attention_mask must have the shape of input_ids, {_said(ids)}, not {_said(mask)}"
        )
    pairs = enumerate(zip(rows, masks, strict=True))
    kept = [_kept(row, shown, number=number) for number, (row, shown) in pairs]
    return kept if nested and not one else kept[0]


def _is_tokenized(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "input_ids" in prompt


def _kept(row: list[int], mask: list[Any], *, number: int) -> list[int]:
    """Return the tokens of one prompt that the mask shows."""
    if any(value not in (0, 1) for value in mask):
        raise GenerationError("attention_mask must hold 1 at the tokens of a prompt, else 0")
    shown = [place for place, value in enumerate(mask) if value]
    if shown and shown[-1] - shown[0] >= len(shown):
        hole = next(place for place in range(shown[0], shown[-1]) if not mask[place])
        raise GenerationError(
            f"attention_mask has a hole at place {hole} of prompt {number}; a prompt is padded on "
            "its left or its right only"
        )
    return [row[place] for place in shown]


def _require_no_types(types: Any) -> None:
    flat = [_plain(types)] if types is not None else []
    while flat:
        part = flat.pop()
        if isinstance(part, (list, tuple)):
            flat += part
        elif part:
            raise GenerationError("token_type_ids other than 0 are not passed on; leave them out")


def _plain(values: Any) -> Any:
    """Return a tensor or an array as lists, anything else as it is; lists of tensors as lists."""
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, (list, tuple)) and values and hasattr(values[0], "tolist"):
        return [_plain(row) for row in values]
    return values


def _shape(rows: Any) -> list[int] | None:
    """Return the length of each row; None if these are no rows."""
    if not isinstance(rows, (list, tuple)):
        return None
    lengths = [len(row) if isinstance(row, (list, tuple)) else -1 for row in rows]
    flat = all(
        not isinstance(value, (list, tuple))
        for row in rows
        if isinstance(row, (list, tuple))
        for value in row
    )
    return lengths if flat else None


def _said(values: Any) -> str:
    """Return a shape in words, for an error."""
    shape: list[int] = []
    while isinstance(values, (list, tuple)):
        shape.append(len(values))
        values = values[0] if values else None
    return str(shape)
