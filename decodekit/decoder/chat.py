"""From chat messages to token ids, by what the tokenizer itself knows of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decodekit.errors import ConfigError, GenerationError, shortened

__all__ = ["ChatOptions", "apply_template", "can_chat", "is_continued"]

_FIELDS = ("add_generation_prompt", "continue_final_message", "tools")
# What apply_chat_template is told about its result, and not about the template.
_OF_THE_RESULT = (
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
_TRIAL = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How messages are rendered; the names are those of ``apply_chat_template``.

    Attributes:
        continue_final_message: Whether the last message is left open, to be continued; None means
            if it is a text of the assistant's.
        add_generation_prompt: Whether the answer's header is added; None means if the last message
            is not continued.
        tools: JSON schemas or functions that the model may call.
        chat_template_kwargs: Variables of the template. One that it does not use has no effect.

    Raises:
        ConfigError: Something has another type, or two of them exclude each other.
    """

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("continue_final_message", "add_generation_prompt"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                _refuse(name, "true or false", getattr(self, name))
        if self.continue_final_message and self.add_generation_prompt:
            raise ConfigError(
                "continue_final_message and add_generation_prompt exclude each other: the last "
                "message is continued, or answered",
                key="continue_final_message",
            )
        if not isinstance(self.tools, (list, tuple, type(None))) or not all(
            isinstance(tool, Mapping) or callable(tool) for tool in self.tools or ()
        ):
            _refuse("tools", "a list of JSON schemas or functions", self.tools)
        given = self.chat_template_kwargs
        if not isinstance(given, (Mapping, type(None))) or not all(map(_is_name, given or ())):
            _refuse("chat_template_kwargs", "a mapping with texts as keys", given)
        for name in given or ():
            key = f"chat_template_kwargs.{name}"
            if name in _FIELDS:
                message = f"{name} is an option of its own; give it outside of chat_template_kwargs"
                raise ConfigError(message, key=key)
            if name in _OF_THE_RESULT:
                message = f"{name} is no variable of a chat template; leave it out"
                raise ConfigError(message, key=key)
            if name == "chat_template" and not isinstance((given or {})[name], str):
                _refuse(key, "the text of a template, or the name of one", (given or {})[name])

    def over(self, defaults: Mapping[str, Any]) -> ChatOptions:
        """Return these options, with variables of the template where they do not give them."""
        given = {**defaults, **(self.chat_template_kwargs or {})}
        return replace(self, chat_template_kwargs=given)

    def require_unused(self) -> None:
        """Raise if one of them is asked for although there are no messages.

        Raises:
            ConfigError: One of them is.
        """
        for name in (*_FIELDS, "chat_template_kwargs"):
            if getattr(self, name):
                message = f"{name} needs chat messages, or text with chat=true"
                raise ConfigError(message, key=name)


def _is_name(key: object) -> bool:
    return isinstance(key, str)


def _refuse(name: str, rule: str, value: object) -> None:
    raise ConfigError(f"{name} must be {rule}, not {shortened(value)}", key=name, value=value)


def can_chat(tokenizer: Any) -> bool:
    """Return whether a tokenizer turns messages into tokens: by a template, or in another way.

    Those of ``mistral-common`` have no template; whether one without works shows when it is tried.
    """
    if getattr(tokenizer, "chat_template", None) is not None:
        return True
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        return False
    try:
        return bool(_ids_of(tokenizer.apply_chat_template(_TRIAL, tokenize=True)))
    except Exception:
        return False  # transformers raises ValueError where there is no template


def is_continued(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> bool:
    """Return whether the last of the messages is continued, and not answered."""
    asked = options.continue_final_message
    if asked is not None or options.add_generation_prompt:
        return bool(asked)
    last = messages[-1]
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    content = last.get("content")
    blocks = content if isinstance(content, (list, tuple)) else ()
    return isinstance(content, str) or any(
        isinstance(block, Mapping) and "text" in block for block in blocks
    )


def apply_template(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, options: ChatOptions
) -> list[int]:
    """Return the token ids of messages.

    Args:
        messages: At least one.
        tokenizer: A ``transformers`` tokenizer, or None.
        options: How they are rendered.

    Raises:
        GenerationError: There is no chat template, or it refuses the messages.
    """
    # A template of its own is rendered to text; what has none makes tokens only.
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if not has_template and not can_chat(tokenizer):
        raise GenerationError(
            "the model has no chat template; give the prompt as text with chat=false"
        )
    continued = is_continued(messages, options)
    adds = options.add_generation_prompt
    asked: dict[str, Any] = {
        **(options.chat_template_kwargs or {}),
        "add_generation_prompt": not continued if adds is None else adds,
    }
    if continued:
        asked["continue_final_message"] = True
    if options.tools:
        asked["tools"] = list(options.tools)
    try:
        made = tokenizer.apply_chat_template(messages, tokenize=not has_template, **asked)
        if isinstance(made, str):
            made.encode()
        # The template writes the special tokens itself.
        return _ids_of(tokenizer(made, add_special_tokens=False) if has_template else made)
    except UnicodeEncodeError as error:
        raise GenerationError("the messages are not valid Unicode text") from error
    except Exception as error:
        raise GenerationError(f"the chat template refuses the messages: {error}") from error


def _ids_of(made: Any) -> list[int]:
    """Return token ids from a list, a tensor or what a tokenizer returns, of one text."""
    ids = made["input_ids"] if hasattr(made, "keys") else made
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return list(ids[0]) if ids and isinstance(ids[0], (list, tuple)) else ids
