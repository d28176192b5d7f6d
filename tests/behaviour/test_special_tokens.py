"""Special tokens in stop strings and in the text, on tokenizers of each kind."""

from __future__ import annotations

from typing import Any

import pytest

from decodekit.engine.detokenizer import IncrementalText
from decodekit.errors import ConfigError
from tests.support.fakes import Given, OracleProposer
from tests.support.spelling import TOKENIZERS, ids_of, says, spelled

PROMPT = "Paris is"
every_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


def answer(kind: str, names: list[str], *, runs: int = 1, **options: Any) -> tuple[Any, list[str]]:
    """Return the result of an answer of these tokens, and what its stream showed.

    ``runs`` is the number of tokens that are accepted at once.
    """
    tokenizer = spelled(kind)
    tokens = ids_of(tokenizer, *names)
    prompt = tokenizer(PROMPT)["input_ids"]
    oracle = Given(lambda: OracleProposer([*prompt, *tokens], depth=runs - 1))
    decoder = says(tokenizer, tokens, prompt=PROMPT, chat=False)
    decoder.strategy = oracle if runs > 1 else decoder.strategy
    options.setdefault("max_new_tokens", len(tokens))
    stream = decoder.stream(PROMPT, chat=False, **options)
    shown = [chunk.text for chunk in stream]
    assert "".join(shown) == stream.result.text
    batch = decoder.generate([PROMPT, PROMPT], chat=False, **options)
    assert {one.text for one in batch} == {stream.result.text}
    return stream.result, shown


@every_tokenizer
@pytest.mark.parametrize("runs", [1, 4])
def test_a_stop_string_that_is_a_special_token_ends_the_text(kind: str, runs: int) -> None:
    names = ["▁done", "<|im_end|>", "▁User", "</s>"]
    result, _ = answer(kind, names, runs=runs, stop=["<|im_end|>"])
    assert (result.text, result.finish_reason, len(result.tokens)) == (" done", "stop", 2)
    unstopped, _ = answer(kind, names, runs=runs)
    assert (unstopped.text, unstopped.finish_reason) == (" done User", "eos")


@every_tokenizer
@pytest.mark.parametrize("runs", [1, 5])
@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ("<|im_end|>\nUser", " yes done", 5),  # goes on after the token
        ("done<|im_end|>", " yes ", 3),  # begins before it
        (" done<|im_end|>\nU", " yes", 5),
        ("<|im_end|>\n<|im_start|>", None, 7),
        ("<|im_end|>User", None, 7),  # never comes
        ("\nUser", " yes done", 5),  # needs no special token
        ("done\nUser", " yes ", 5),  # nor sees it
    ],
)
def test_a_special_token_may_be_anywhere_in_a_stop_string(
    kind: str, runs: int, stop: str, text: str | None, count: int
) -> None:
    names = ["▁yes", "▁done", "<|im_end|>", "\n", "User", "▁no", "</s>"]
    result, _ = answer(kind, names, runs=runs, stop=["xyz", stop])
    assert result.text == (" yes done\nUser no" if text is None else text)
    assert len(result.tokens) == count


@every_tokenizer
def test_a_space_behind_the_special_token_that_begins_an_answer_counts(kind: str) -> None:
    tokenizer = spelled(kind)
    tokens = ids_of(tokenizer, "<|im_end|>", "▁yes")
    text = IncrementalText(tokenizer, stop=["<|im_end|> y"])
    assert [text.push(token) for token in tokens] == [False, True]
    assert text.text == ""
    shown = IncrementalText(tokenizer, stop=["<|im_end|> n"])
    for token in tokens:
        shown.push(token)
    assert shown.text == tokenizer.decode(tokens, skip_special_tokens=True)


def test_nothing_that_may_become_a_stop_string_is_shown() -> None:
    names = ["▁yes", "<|im_end|>", "\n", "no", "done", "<|im_end|>", "\n", "User", "!"]
    _, shown = answer("sentencepiece", names, stop=["done<|im_end|>\nUser", "<|im_end|>\nPar"])
    assert shown == [" yes", "", "", "\nno", "", "", "", ""]


def test_a_stop_string_is_spelled_out_as_well() -> None:
    names = ["▁yes", "is</", "s", ">", "no"]
    result, _ = answer("byte level", names, stop=["</s>"])
    assert (result.text, result.finish_reason) == (" yesis", "stop")


def test_no_special_token_that_is_a_stop_string_comes_before_min_new_tokens() -> None:
    names = ["▁yes", "<|im_end|>", "▁no"]
    options = {"stop": ["<|im_end|>"], "max_new_tokens": 6, "min_new_tokens": 5}
    result, _ = answer("byte level", names, **options)
    assert ids_of(spelled("byte level"), "<|im_end|>")[0] not in result.tokens[:5]
    assert len(result.tokens) >= 5


@every_tokenizer
def test_special_tokens_are_in_the_text_if_they_are_not_skipped(kind: str) -> None:
    names = ["▁yes", "<|im_end|>", "\n", "<|im_start|>", "▁User", "</s>"]
    result, _ = answer(kind, names, skip_special_tokens=False)
    assert result.text == " yes<|im_end|>\n<|im_start|> User</s>"
    whole = spelled(kind).decode([*result.prompt_tokens, *result.tokens])
    assert whole.endswith(result.text)
    stopped, _ = answer(kind, names, skip_special_tokens=False, stop=["end|>\n<|im_start|>"])
    assert (stopped.text, len(stopped.tokens)) == (" yes<|im_", 4)


@every_tokenizer
@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": ["on"]}, " yes don"),  # inside a token
        ({"stop": ["done<|im_end|>"]}, " yes done<|im_end|>"),
        ({"stop": ["<|im_end|>"]}, " yes done<|im_end|>"),
        ({"stop": ["<|im_end|>"], "skip_special_tokens": False}, " yes done<|im_end|>"),
        ({"stop": ["done\nU"]}, " yes done\nU"),
        ({"stop_token_ids": ["\n", "User"]}, " yes done\nUser"),
    ],
)
def test_the_text_ends_with_the_stop_string_if_that_is_included(
    kind: str, runs: int, options: dict[str, Any], text: str
) -> None:
    options = dict(options)
    if "stop_token_ids" in options:
        options["stop_token_ids"] = [ids_of(spelled(kind), *options["stop_token_ids"])]
    names = ["▁yes", "▁done", "<|im_end|>", "\n", "User", "▁no", "</s>"]
    result, _ = answer(kind, names, runs=runs, include_stop_str_in_output=True, **options)
    assert (result.text, result.finish_reason) == (text, "stop")


@pytest.mark.parametrize("name", ["skip_special_tokens", "include_stop_str_in_output"])
def test_a_switch_is_true_or_false(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be true or false, not 'no'"):
        answer("gemma", ["yes"], **{name: "no"})
