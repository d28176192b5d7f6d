"""Chat messages, templated text and token ids: the same tokens, continued as transformers does."""

from __future__ import annotations

from typing import Any

import pytest

from decodekit import Decoder, Request
from decodekit.decoder.build import build_strategy
from decodekit.errors import ConfigError, GenerationError
from tests.support.fakes import ToyAdapter
from tests.support.spelling import TOKENIZERS, Says, ids_of, says, spelled

USER = [{"role": "user", "content": "Paris is"}]
BEGUN = [*USER, {"role": "assistant", "content": "The answer is"}]
every_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


def plain(kind: str = "byte level", **settings: Any) -> Decoder:
    tokenizer = spelled(kind)
    model = ToyAdapter(len(tokenizer))
    return Decoder(model, tokenizer, strategy=build_strategy("jacobi"), **settings)


def rendered(kind: str, messages: list[dict[str, str]], **options: Any) -> str:
    text = spelled(kind).apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@every_tokenizer
@pytest.mark.parametrize("chat", [None, False])
def test_text_from_a_template_has_one_bos_and_is_not_wrapped_again(
    kind: str, chat: bool | None
) -> None:
    decoder = plain(kind)
    text = rendered(kind, USER, add_generation_prompt=True)
    messages = decoder.encode(USER)
    assert decoder.encode(text, chat=chat) == messages
    assert messages.count(spelled(kind).bos_token_id) == 1
    assert decoder.generate(text, chat=chat, max_new_tokens=3).prompt_tokens == messages
    assert decoder.encode("Paris", chat=False)[0] == spelled(kind).bos_token_id
    assert decoder.encode("<s><s>Paris", chat=False)[:3].count(1) == 2  # as it is written


def test_a_request_that_says_so_wraps_text_that_begins_with_the_bos() -> None:
    wrapped = plain().encode("<s> is a tag", chat=True)
    assert wrapped == plain().encode([{"role": "user", "content": "<s> is a tag"}])


@every_tokenizer
def test_the_same_prompt_as_text_and_as_ids_gives_the_same_text(kind: str) -> None:
    tokenizer = spelled(kind)
    answer = ids_of(tokenizer, "▁yes", "▁no", "</s>")
    decoder = says(tokenizer, answer, prompt="Paris is", chat=False)
    text = decoder.generate("Paris is", chat=False)
    ids = decoder.generate(tokenizer("Paris is")["input_ids"])
    assert text.text == ids.text == " yes no"
    assert text.prompt_tokens == ids.prompt_tokens


def test_ids_that_end_in_a_run_of_byte_tokens_do_not_break_the_answer() -> None:
    tokenizer = spelled("sentencepiece")
    prompt = tokenizer("漢字漢字")["input_ids"]
    answer = [*tokenizer("字", add_special_tokens=False)["input_ids"][1:], tokenizer.eos_token_id]
    decoder = says(tokenizer, answer, prompt=prompt)
    assert decoder.generate(prompt).text == "字"


@every_tokenizer
def test_a_final_message_of_the_assistant_is_continued_as_transformers_does(kind: str) -> None:
    tokenizer = spelled(kind)
    expected = tokenizer.apply_chat_template(
        BEGUN, continue_final_message=True, tokenize=True, return_dict=False
    )
    answer = ids_of(tokenizer, "▁yes", "</s>")
    decoder = says(tokenizer, answer, prompt=BEGUN)
    result = decoder.generate(BEGUN)
    assert result.prompt_tokens == decoder.encode(BEGUN) == expected
    assert result.text == " yes"  # it goes on where the message ends
    batch = decoder.generate([BEGUN, BEGUN])
    assert [one.text for one in batch] == [" yes", " yes"]
    assert "".join(chunk.text for chunk in decoder.stream(BEGUN)) == " yes"


@pytest.mark.parametrize(
    "options",
    [{"continue_final_message": False}, {"add_generation_prompt": True}],
    ids=["not continued", "answered"],
)
def test_a_final_message_of_the_assistant_may_be_answered(options: dict[str, Any]) -> None:
    result = plain().generate(BEGUN, max_new_tokens=1, **options)
    text = rendered("byte level", BEGUN, add_generation_prompt=True)
    assert (
        result.prompt_tokens == spelled("byte level")(text, add_special_tokens=False)["input_ids"]
    )


def test_messages_may_end_without_the_header_of_an_answer() -> None:
    result = plain().generate(USER, max_new_tokens=1, add_generation_prompt=False)
    text = rendered("byte level", USER, add_generation_prompt=False)
    assert (
        result.prompt_tokens == spelled("byte level")(text, add_special_tokens=False)["input_ids"]
    )


def test_a_call_of_a_tool_is_not_continued() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    assert plain().encode([*USER, call])[-10:] == plain().encode(USER)[-10:]


def test_variables_and_tools_reach_the_template() -> None:
    def weather(city: str) -> str:
        """Say the weather.

        Args:
            city: Where.
        """
        return city

    tokenizer = spelled("byte level")
    result = plain().generate(
        Request(USER, tools=[weather, {"type": "function"}]),
        chat_template_kwargs={"enable_thinking": False},
        max_new_tokens=1,
    )
    shown = tokenizer.decode(result.prompt_tokens)
    assert "[2 tools]" in shown
    assert shown.endswith("(no) ")


def test_variables_of_the_decoder_hold_where_a_request_does_not_say() -> None:
    decoder = plain(chat_template_kwargs={"enable_thinking": False})
    for one in (decoder, decoder.with_strategy("autoregressive")):
        assert one.tokenizer.decode(one.encode(USER)).endswith("(no) ")
        assert one.tokenizer.decode(one.encode("Paris")).endswith("(no) ")
        assert one.encode("Paris", chat=False) == plain().encode("Paris", chat=False)
    request = Request(USER, chat_template_kwargs={"enable_thinking": True})
    shown = decoder.tokenizer.decode(decoder.generate(request, max_new_tokens=1).prompt_tokens)
    assert shown.endswith("assistant\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_final_message": "yes"}, "continue_final_message must be true or false, not"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message and add_generation_prompt exclude each other: the last message "
            "is continued, or answered",
        ),
        ({"tools": "weather"}, "tools must be a list of JSON schemas or functions, not 'weather'"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs must be a mapping with texts as"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "tokenize is no variable of a chat template; leave it out",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "messages is no variable of a chat template; leave it out",
        ),
        (
            {"chat_template_kwargs": {"chat_template": 5}},
            "chat_template_kwargs.chat_template must be the text of a template, or the name of one",
        ),
        (
            {"chat_template_kwargs": {"tools": []}},
            "tools is an option of its own; give it outside of chat_template_kwargs",
        ),
    ],
)
def test_a_mistake_in_an_option_of_the_template_is_one_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plain().generate(USER, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("prompt", ["Paris", [5, 6]])
def test_options_of_the_template_need_messages(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="needs chat messages, or text with chat=true"):
        plain().generate(prompt, chat=False, tools=[{"type": "function"}])


class Tekken:
    """Makes tokens of messages without a template, as the tokenizers of ``mistral-common`` do."""

    def __init__(self) -> None:
        self.inner = spelled("byte level")

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool = True, **options: Any
    ) -> Any:
        if not tokenize:
            raise NotImplementedError("tokenize=False is unsafe")
        made = self.inner.apply_chat_template(messages, tokenize=True, **options)
        return dict(made)

    def __call__(self, text: str, **options: Any) -> Any:
        return self.inner(text, **options)

    def decode(self, *args: Any, **options: Any) -> Any:
        return self.inner.decode(*args, **options)

    def __len__(self) -> int:
        return len(self.inner)

    def added_tokens_decoder(self) -> Any:
        raise NotImplementedError("not by design")

    @property
    def all_special_ids(self) -> Any:
        return self.inner.all_special_ids

    @property
    def all_special_tokens(self) -> Any:
        return self.inner.all_special_tokens


class WithAnAttribute(Tekken):
    chat_template = None


@pytest.mark.parametrize("kind", [Tekken, WithAnAttribute])
def test_a_tokenizer_without_a_template_that_knows_messages_is_used_for_chats(kind: Any) -> None:
    tokenizer = kind()
    decoder = Decoder(ToyAdapter(len(tokenizer)), tokenizer, strategy=build_strategy("jacobi"))
    assert decoder.chat is True
    expected = plain().encode(USER)
    assert decoder.encode(USER) == decoder.encode(USER[0]["content"]) == expected
    assert decoder.generate(BEGUN, max_new_tokens=2).prompt_tokens == plain().encode(BEGUN)


def test_such_a_tokenizer_has_stop_strings_and_bad_words() -> None:
    tokenizer = Tekken()
    yes, end, no = ids_of(tokenizer.inner, "yes", "</s>", "no")
    model = Says(tokenizer.inner, [yes, end, no], after=1)
    model.eos_token_ids = frozenset()
    decoder = Decoder(model, tokenizer, strategy=build_strategy("jacobi"))
    assert decoder.generate([1], stop="</s>", max_new_tokens=3).tokens == [yes, end]
    assert "yes" not in decoder.generate([1], bad_words=["yes"], max_new_tokens=3).text


def test_a_tokenizer_without_a_template_that_knows_none_is_not() -> None:
    tokenizer = spelled("gemma").__class__(tokenizer_object=spelled("gemma").backend_tokenizer)
    decoder = Decoder(ToyAdapter(len(tokenizer)), tokenizer, strategy=build_strategy("jacobi"))
    assert decoder.chat is False
    with pytest.raises(GenerationError, match="the model has no chat template"):
        decoder.encode(USER)
