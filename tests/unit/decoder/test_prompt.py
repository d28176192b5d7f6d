"""From text, ids and messages to token ids, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decodekit.decoder.prompt import encode_prompt
from decodekit.errors import GenerationError

V = 300
MESSAGES = [{"role": "user", "content": "hi"}]


class Letters:
    """A tokenizer whose ids are code points; 256 begins a text, 257 a message."""

    chat_template: str | None = "{{ messages }}"

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [257 if letter == "|" else ord(letter) for letter in text]
        return {"input_ids": [256, *ids] if add_special_tokens else ids}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"|{m['role'][0]}{m['content']}" for m in messages) + "|a"


class Plain(Letters):
    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def encode(prompt: Any, *, tokenizer: Any = None, chat: bool = False) -> list[int]:
    return encode_prompt(prompt, tokenizer, chat=chat, vocab_size=V).tokens


def test_text_is_tokenized_with_its_special_tokens() -> None:
    assert encode("ab", tokenizer=Letters()) == [256, 97, 98]


def test_text_in_a_chat_is_one_message_and_the_template_has_the_special_tokens() -> None:
    assert encode("ab", tokenizer=Letters(), chat=True) == [257, 117, 97, 98, 257, 97]


@pytest.mark.parametrize("chat", [True, False])
def test_messages_always_go_through_the_template(chat: bool) -> None:
    messages = [{"role": "system", "content": "x"}, *MESSAGES]
    expected = [257, 115, 120, 257, 117, 104, 105, 257, 97]
    assert encode(messages, tokenizer=Letters(), chat=chat) == expected
    assert encode(tuple(messages), tokenizer=Letters(), chat=chat) == expected


@pytest.mark.parametrize(
    "ids",
    [
        [0, 5, 299],
        (0, 5, 299),
        range(3),
        torch.tensor([0, 5, 299]),
        torch.tensor([[0, 5, 299]]),
        np.array([0, 5, 299]),
        np.array([[0, 5, 299]]),
    ],
    ids=lambda ids: f"{type(ids).__name__} {np.shape(ids)}",
)
def test_token_ids_are_taken_as_they_are(ids: Any) -> None:
    encoded = encode(ids)
    assert encoded == ([0, 1, 2] if isinstance(ids, range) else [0, 5, 299])
    assert type(encoded) is list
    assert {type(item) for item in encoded} == {int}


def test_the_callers_list_is_not_shared() -> None:
    ids = [1, 2]
    encode(ids).append(3)
    assert ids == [1, 2]


EMPTY = "the prompt is empty; give some text or at least one token id"


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "chat", "message"),
    [
        ([], None, False, EMPTY),
        (torch.tensor([], dtype=torch.int64), None, False, EMPTY),
        ("", Plain(), False, EMPTY),
        (" \n", Letters(), True, "the prompt is empty; give some text"),
        (
            "hi",
            None,
            False,
            "a text prompt needs a tokenizer; give token ids or a tokenizer",
        ),
        (
            "hi",
            Plain(),
            True,
            "the model has no chat template; give the prompt as text with chat=false",
        ),
        (
            MESSAGES,
            None,
            False,
            "the model has no chat template; give the prompt as text with chat=false",
        ),
        ([1, 300], None, False, "token id 300 is outside the vocabulary, 0 .. 299"),
        ([1, -1], None, False, "token id -1 is outside the vocabulary, 0 .. 299"),
        ([1, "x"], None, False, "a prompt is text, token ids or chat messages; it holds 'x'"),
        ([1, True], None, False, "a prompt is text, token ids or chat messages; it holds True"),
        ([1, 2.0], None, False, "a prompt is text, token ids or chat messages; it holds 2.0"),
        (
            [[1, 2], [3]],
            None,
            False,
            "a prompt is text, token ids or chat messages; it holds [1, 2]",
        ),
        (
            [*MESSAGES, "hi"],
            Letters(),
            True,
            "a prompt is text, token ids or chat messages; it holds "
            "{'role': 'user', 'content': 'hi'}",
        ),
        (
            [{"role": "x" * 99}, 1],
            None,
            False,
            "a prompt is text, token ids or chat messages; it holds {'role': '" + "x" * 70,
        ),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(
    prompt: Any, tokenizer: Any, chat: bool, message: str
) -> None:
    with pytest.raises(GenerationError) as caught:
        encode(prompt, tokenizer=tokenizer, chat=chat)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (None, "NoneType"),
        (5, "int"),
        (b"bytes", "bytes"),
        (torch.tensor(5), "Tensor"),
        (MESSAGES[0], "dict; give its input_ids"),
        ({1, 2}, "set"),
    ],
)
def test_what_is_not_even_a_sequence_is_refused_alike(prompt: Any, kind: str) -> None:
    with pytest.raises(GenerationError) as caught:
        encode(prompt, tokenizer=Letters())
    assert str(caught.value) == f"a prompt is text, token ids or chat messages, not {kind}"


def test_a_template_that_refuses_the_messages_says_why() -> None:
    class Strict(Letters):
        def apply_chat_template(self, *args: Any, **options: Any) -> str:
            raise ValueError("roles must alternate")

    with pytest.raises(GenerationError) as caught:
        encode(MESSAGES, tokenizer=Strict())
    assert str(caught.value) == "the chat template refuses the messages: roles must alternate"
    assert isinstance(caught.value.__cause__, ValueError)
