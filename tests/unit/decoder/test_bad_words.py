"""Bans of texts against the tokenizer's own ``decode``, on tokenizers of each kind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from decodekit.decoder.bad_words import ban_words
from decodekit.decoder.token_bytes import token_bytes
from decodekit.errors import ConfigError
from tests.support.fakes import PieceTokenizer
from tests.support.spelling import SPECIAL, TOKENIZERS, ids_of, says, spelled

every_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)
BROKEN = "\ufffd"


def banned(
    words: Sequence[str], tokenizer: Any, prefix: Sequence[int], *, start: int = 0, size: int = 0
) -> set[int]:
    """Return the tokens that must not follow a prefix."""
    size = size or len(tokenizer)
    scores = torch.zeros(1, size)
    ids = torch.tensor([list(prefix)], dtype=torch.int64).reshape(1, -1)
    for processor in ban_words(words, tokenizer, vocab_size=size, start=start):
        changed = processor(ids, scores)
        assert not scores.eq(-torch.inf).any() or changed is not scores
        scores = changed
    return set((scores[0] == -torch.inf).nonzero().flatten().tolist())


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


@every_tokenizer
@pytest.mark.parametrize("fresh", [True, False], ids=["answer", "continuation"])
def test_what_is_banned_is_what_would_put_a_word_into_the_text(kind: str, fresh: bool) -> None:
    """Random texts in which parts of words are frequent; every token is tried after each."""
    tokenizer = spelled(kind)
    words = ["Paris", " yes", "no", "s is", "é", "漢", "a"]
    likely = [
        *ids_of(
            tokenizer, "▁Par", "Par", "is", "▁is", "▁", "y", "e", "s", "n", "<s>", "<|im_end|>"
        ),
        *tokenizer("é漢", add_special_tokens=False)["input_ids"],
    ]
    rng = random.Random(5)
    prompt = ids_of(tokenizer, "<s>", "▁the", "Par") if fresh else []
    tried = found = 0
    while tried < 60:
        answer = [rng.choice(likely) for _ in range(rng.randrange(7))]
        before = text_of(tokenizer, answer)
        if BROKEN in before or any(word in before for word in words):
            continue
        tried += 1
        got = banned(words, tokenizer, [*prompt, *answer], start=len(prompt))
        expected = set()
        for token in range(len(tokenizer)):
            after = text_of(tokenizer, [*answer, token])
            if BROKEN not in after and any(word in after for word in words):
                expected.add(token)
        assert got == expected, answer
        found += len(expected) > len(banned(words, tokenizer, prompt, start=len(prompt)))
    assert found > 3


@every_tokenizer
@pytest.mark.parametrize("first", [[], ["("], ["\n"], ["▁the"]])
def test_a_bad_word_does_not_come_in_any_form(kind: str, first: list[str]) -> None:
    """``(Paris)`` and a line that begins with it came through the ids of " Paris"."""
    tokenizer = spelled(kind)
    for names in (["Paris"], ["▁Paris"], ["Par", "is"], ["P", "a", "r", "i", "s"], ["Par", "is</"]):
        tokens = ids_of(tokenizer, *first, *names, ")")
        for chat, prompt in ((True, "Say it"), (False, "The city is")):
            decoder = says(tokenizer, tokens, prompt=prompt, chat=chat)
            said = decoder.generate(prompt, chat=chat, max_new_tokens=len(tokens))
            assert "Paris" in said.text
            result = decoder.generate(
                prompt, chat=chat, max_new_tokens=len(tokens), bad_words=["Paris"]
            )
            assert "Paris" not in result.text
            assert result.text.startswith(said.text.partition("Paris")[0].rstrip())


@every_tokenizer
def test_strategies_agree_under_a_ban(kind: str) -> None:
    tokenizer = spelled(kind)
    tokens = ids_of(tokenizer, *["▁yes", "Par", "is", "▁no"] * 5)
    options = {"bad_words": ["Paris", "s n"], "max_new_tokens": 24, "chat": True}
    answers = {
        tuple(
            says(tokenizer, tokens, prompt="Say it", chat=True, strategy=strategy)
            .generate("Say it", **options)
            .tokens
        )
        for strategy in ("autoregressive", "jacobi", "lookahead", "prompt_lookup")
    }
    assert len(answers) == 1


def test_a_special_token_can_be_banned_alone_and_in_a_word() -> None:
    tokenizer = spelled("byte level")
    end, done, yes = ids_of(tokenizer, "<|im_end|>", "done", "yes")
    assert banned(["<|im_end|>"], tokenizer, [done]) == {end}
    assert end in banned(["done<|im_end|>", "Paris"], tokenizer, [done])
    assert end not in banned(["done<|im_end|>", "Paris"], tokenizer, [yes])


def test_a_word_may_begin_in_the_prompt_that_the_answer_continues() -> None:
    tokenizer = spelled("sentencepiece")
    par, is_ = ids_of(tokenizer, "▁Par", "is")
    assert is_ in banned(["Paris"], tokenizer, [1, par])
    assert is_ not in banned(["Paris"], tokenizer, [1, par], start=2)


def test_a_long_run_of_tokens_without_text_hides_no_word() -> None:
    tokenizer = spelled("gemma")
    par, is_, special = ids_of(tokenizer, "Par", "is", "<|im_start|>")
    assert is_ in banned(["Paris"], tokenizer, [1, par, *[special] * 60])


def test_tokens_that_the_model_has_not_change_nothing() -> None:
    tokenizer = spelled("gemma")
    smaller = banned(["is"], tokenizer, [1], size=300)
    assert smaller == {token for token in banned(["is"], tokenizer, [1]) if token < 300}
    assert banned(["is"], tokenizer, [1], size=len(tokenizer) + 9) == banned(["is"], tokenizer, [1])


def test_tokens_that_are_added_later_are_seen() -> None:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "cat": 1, "dog": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = spelled("gemma").__class__(tokenizer_object=inner)
    assert banned(["cat dog"], tokenizer, [1]) == {2}  # decoded with a space between words
    assert banned(["cow"], tokenizer, [1]) == set()
    tokenizer.add_tokens([AddedToken("cow", normalized=False)])
    assert banned(["cow"], tokenizer, [1]) == {3}


def test_a_tokenizer_that_is_not_of_transformers_is_read_by_its_decode() -> None:
    class Sized(PieceTokenizer):
        def __len__(self) -> int:
            return len(self.pieces)

    tokenizer = Sized(["▁cat", "cat", "▁", "s", "c", "at"])
    assert token_bytes(tokenizer).pieces == [b" cat", b"cat", b" ", b"s", b"c", b"at"]
    assert banned([" cat"], tokenizer, []) == set()
    assert banned([" cat"], tokenizer, [3]) == {0}
    assert banned([" cat"], tokenizer, [3, 2, 4]) == {0, 5}


@every_tokenizer
def test_the_bytes_of_tokens_are_the_text(kind: str) -> None:
    tokenizer = spelled(kind)
    table = token_bytes(tokenizer)
    assert token_bytes(tokenizer) is table
    rng = random.Random(2)
    for _ in range(200):
        tokens = [rng.randrange(len(SPECIAL), len(tokenizer)) for _ in range(5)]
        text = text_of(tokenizer, tokens)
        if BROKEN in text:
            continue
        head, *rest = tokens
        joined = table.starts.get(head, table.pieces[head])
        assert (joined + b"".join(table.pieces[token] for token in rest)).decode() == text


@pytest.mark.parametrize("words", [[""], ["cat", ""]])
def test_an_empty_bad_word_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="a bad word must have a character") as caught:
        ban_words(words, spelled("gemma"), vocab_size=9, start=0)
    assert (caught.value.key, caught.value.value) == ("sampling.bad_words", words)
