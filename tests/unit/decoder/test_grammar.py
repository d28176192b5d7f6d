"""Constraints on a grammar library: what is allowed is what the regex or the schema says."""

from __future__ import annotations

import gc
import json
import random
import re
import string
import sys
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("llguidance")

from decodekit.decoder import grammar as guidance
from decodekit.decoder import grammar_tokens
from decodekit.decoder.grammar import json_schema_constraint, regex_constraint
from decodekit.errors import ConfigError, GenerationError
from decodekit.interfaces.logits import Constraint

SPECIAL = ["<unk>", "<s>", "</s>", "<end>"]
CORPUS = [
    "the cat sat on the mat, and the dog ran to the cat",
    '{"name": "Tom", "age": 12, "kind": "cat", "tags": ["red", "blue"], "ok": true}',
    '{"name":"Ann","age":7,"kind":"dog","tags":[],"ok":false}',
    "2024-05-17 555-1234 000-9999 +49 (30) 12.50 é ü ß 日本",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of about 340 tokens, of which the first are special."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[AddedToken(word, special=True) for word in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


TOKENIZER = make_tokenizer()
SIZE = len(TOKENIZER)
EOS, END = SPECIAL.index("</s>"), SPECIAL.index("<end>")


def regex(pattern: str, *, size: int = SIZE, ends: Collection[int] = (EOS,)) -> Constraint:
    return regex_constraint(pattern, TOKENIZER, vocab_size=size, eos_token_ids=ends)


def schema(text: Any, *, size: int = SIZE, ends: Collection[int] = (EOS,)) -> Constraint:
    return json_schema_constraint(text, TOKENIZER, vocab_size=size, eos_token_ids=ends)


def decode(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens))


def allowed(constraint: Constraint) -> list[int]:
    return constraint.mask().nonzero().flatten().tolist()


def feed(constraint: Constraint, text: str) -> bool:
    """Take in a text, one token for each byte, and return whether all of it is allowed."""
    return all(constraint.advance(TOKENIZER.convert_tokens_to_ids(c)) for c in to_bytes(text))


def to_bytes(text: str) -> list[str]:
    """Return the byte-level alphabet's characters of a text."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return list("".join(piece for piece, _ in pieces.pre_tokenize_str(text)))


def fits(constraint: Constraint, text: str) -> bool:
    """Return whether a whole text is allowed."""
    fork = constraint.fork()
    return feed(fork, text) and fork.advance(EOS)


def walk(constraint: Constraint, seed: int, *, most: int = 120) -> list[int] | None:
    """Return the tokens of a random walk without its end, or None if it does not end."""
    rng = random.Random(seed)
    tokens: list[int] = []
    for _ in range(most):
        choices = allowed(constraint)
        token = EOS if EOS in choices and rng.random() < 0.3 else rng.choice(choices)
        assert constraint.advance(token)
        if token == EOS:
            assert allowed(constraint) == [EOS]
            return tokens
        tokens.append(token)
    return None


PATTERNS = [
    r"[0-9]{3}-[0-9]{4}",
    r"yes|no|yesterday",
    r"a*",
    r"(the |cat ?){1,4}",
    r"\d{4}-(0[1-9]|1[0-2])",
    r"[a-z]{1,3}é?[ü-ÿ]",
    r".{0,6}",
    r"(?s).{2}\s",
    r"^/[a-z\"]*\\/\n$",
    r"[日本]+|\+?\(\d+\)",
    r"a/b\/c#d <s> %e",
    r"(?i)tOm{2,3}",
    r"\\d[\d-]+[^\d]\D?",
    "",
    r"[^\x00-\xff]?x",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_random_walk_matches_the_regex(pattern: str) -> None:
    start = regex(pattern)
    texts = set()
    for seed in range(40):
        tokens = walk(start.fork(), seed)
        if tokens is not None:
            assert not set(tokens) & set(range(len(SPECIAL)))
            assert re.fullmatch(pattern, decode(tokens)), decode(tokens)
            texts.add(decode(tokens))
    assert texts


@settings(max_examples=100, deadline=None)
@given(
    pattern=st.sampled_from(PATTERNS),
    text=st.text('0123456789-yesnoat c/"\\é\n <>日(+T', max_size=9),
)
def test_a_text_is_allowed_exactly_if_it_matches(pattern: str, text: str) -> None:
    assert fits(regex(pattern), text) == (re.fullmatch(pattern, text) is not None)


@settings(max_examples=30, deadline=None)
@given(
    pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 10**6),
    steps=st.integers(0, 6),
    size=st.sampled_from([SIZE - 60, SIZE, SIZE + 7]),
)
def test_advance_takes_exactly_the_tokens_of_the_mask(
    pattern: str, seed: int, steps: int, size: int
) -> None:
    rng = random.Random(seed)
    constraint = regex(pattern, size=size, ends=(EOS, END))
    for _ in range(steps):
        if choices := [token for token in allowed(constraint) if token not in (EOS, END)]:
            assert constraint.advance(rng.choice(choices))
    untouched = constraint.fork()
    for token in (-1, *range(SIZE + 10)):
        fork = constraint.fork()
        assert fork.advance(token) == (token in allowed(untouched)), token
    # Refusals, one after another and before any mask, leave the state as it was.
    refused = [token for token in range(-3, SIZE + 10) if token not in allowed(untouched)]
    assert not any(constraint.advance(token) for token in refused)
    assert torch.equal(constraint.mask(), untouched.mask())
    for token in allowed(untouched):
        one, other = constraint.fork(), untouched.fork()
        assert one.advance(token)
        assert other.advance(token)
        assert torch.equal(one.mask(), other.mask())


def test_digits_are_ascii_and_words_are_unicode() -> None:
    assert fits(regex(r"\d"), "7")
    assert not fits(regex(r"\d"), "\u0667")
    assert fits(regex(r"\w+"), "é日_7")


def test_every_tokenization_of_an_allowed_text_is_allowed() -> None:
    text = "the cat"
    start = regex(text)
    joined = TOKENIZER.encode(text)
    single = [TOKENIZER.convert_tokens_to_ids(c) for c in to_bytes(text)]
    assert len(joined) < len(single)
    assert {joined[0], single[0]} <= set(allowed(start))
    for tokens in (joined, single):
        fork = start.fork()
        assert all(fork.advance(token) for token in tokens)
        assert allowed(fork) == [EOS]


PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,7}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "kind": {"enum": ["cat", "dog", "cattle"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def is_pet(pet: Any) -> bool:
    tags = pet.get("tags", [])
    return (
        set(pet) <= set(PET["properties"])
        and list(pet) == [name for name in PET["properties"] if name in pet]
        and re.fullmatch("[A-Z][a-z]{1,7}", pet["name"]) is not None
        and type(pet["age"]) is int
        and 0 <= pet["age"] <= 30
        and pet["kind"] in ("cat", "dog", "cattle")
        and len(tags) <= 2
        and all(isinstance(tag, str) and len(tag) <= 3 for tag in tags)
        and pet.get("ok") in (True, False, None)
    )


@pytest.mark.parametrize(
    ("document", "valid"),
    [
        (PET, is_pet),
        ({"type": "integer"}, lambda value: type(value) is int),
        ({"type": "number", "minimum": 0}, lambda value: value >= 0),
        ({"enum": ["a", "ab", 3, None]}, lambda value: value in ("a", "ab", 3, None)),
        ({"const": '// { " %x\n<s> é'}, lambda value: value == '// { " %x\n<s> é'),
        ({"type": "string", "maxLength": 4}, lambda value: len(value) <= 4),
        ({}, lambda value: value is not ...),
    ],
)
def test_a_random_walk_satisfies_the_schema(
    document: dict[str, Any], valid: Callable[[Any], bool]
) -> None:
    start = schema(document)
    assert torch.equal(start.mask(), schema(json.dumps(document)).mask())
    texts = [decode(tokens) for seed in range(40) if (tokens := walk(start.fork(), seed))]
    assert texts
    assert all(valid(json.loads(text)) for text in texts), texts


def test_whitespace_is_a_space_after_a_comma_or_a_colon_at_most() -> None:
    start = schema(PET)
    pet = {"name": "Tom", "age": 3, "kind": "cat", "tags": ["a", "b"], "ok": None}
    assert fits(start, json.dumps(pet))
    assert fits(start, json.dumps(pet, separators=(",", ":")))
    for text in (
        json.dumps(pet, indent=1),
        json.dumps(pet, separators=(",  ", ":")),
        json.dumps(pet, separators=(" ,", ":")),
        json.dumps(pet, separators=(",", " :")),
        " " + json.dumps(pet),
        json.dumps(pet) + "\n",
    ):
        assert not fits(start, text)
    assert not fits(start, json.dumps(pet | {"age": 31}))
    assert not fits(start, json.dumps(pet | {"more": 1}))
    loose = schema({**PET, "x-guidance": {"whitespace_flexible": True}})
    assert fits(loose, json.dumps(pet, indent=1))
    assert fits(loose, json.dumps(pet))


def test_a_schema_may_refer_to_itself() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    start = schema({"$ref": "#/$defs/node", "$defs": {"node": node}})
    for depth in (1, 2, 9):
        assert fits(start, '{"next": ' * depth + "null" + "}" * depth)
        assert not fits(start, '{"next": ' * depth + "null" + "}" * (depth - 1))


def test_a_fork_and_its_origin_do_not_touch_each_other() -> None:
    origin = regex("(a|b)(c|d)(e|f)")
    assert isinstance(origin, Constraint)
    a, b, c, d, e = (TOKENIZER.convert_tokens_to_ids(x) for x in "abcde")
    first = origin.mask()
    left, right = origin.fork(), origin.fork()
    assert left.advance(a)
    assert left.advance(c)
    assert right.advance(b)
    assert torch.equal(origin.mask(), first)
    deeper = left.fork()
    assert deeper.advance(e)
    assert not left.advance(d)
    assert origin.advance(b)
    assert torch.equal(origin.mask(), right.mask())
    assert allowed(deeper) == [EOS]
    assert deeper.fork().advance(EOS)
    # The end is part of the state, too.
    ended = deeper.fork()
    assert ended.advance(EOS)
    assert allowed(ended.fork()) == [EOS]
    assert not left.advance(EOS)
    # The caller may write to a mask.
    left.mask().fill_(True)
    assert not left.mask().all()


def test_any_end_of_text_token_ends_the_text() -> None:
    a = TOKENIZER.convert_tokens_to_ids("a")
    start = regex("a{1,2}", ends=[END, EOS, EOS, 10**6, -5])
    assert not start.advance(EOS)
    assert not start.advance(END)
    assert start.advance(a)
    assert allowed(start) == [EOS, END, a]
    for end in (EOS, END):
        fork = start.fork()
        assert fork.advance(end)
        assert allowed(fork) == [EOS, END]
        assert not fork.advance(a)
        assert fork.advance(EOS)
        assert fork.advance(END)
    assert start.advance(a)
    assert allowed(start) == [EOS, END]


def test_the_tokenizers_own_end_of_text_counts_only_if_it_is_the_models() -> None:
    a, b = (TOKENIZER.convert_tokens_to_ids(x) for x in "ab")
    start = regex("a*", ends=[END])
    assert allowed(start)[:2] == [END, a]
    assert not start.advance(EOS)
    # A token that would be text is none once it ends the text.
    start = regex("[ab]*", ends=[b])
    assert start.advance(a)
    assert start.advance(b)
    assert allowed(start) == [b]
    assert not start.advance(a)


@pytest.mark.parametrize("size", [SIZE - 50, SIZE, SIZE + 1, SIZE + 100])
def test_the_mask_has_the_models_size(size: int) -> None:
    start = regex(r"(?s).+", size=size)
    mask = start.mask()
    assert mask.shape == (size,)
    assert mask.dtype == torch.bool
    assert mask.device.type == "cpu"
    assert mask.is_contiguous()
    assert torch.equal(mask[:SIZE], regex(r"(?s).+").mask()[:size])
    assert not mask[SIZE:].any()
    assert not start.advance(size)
    if size < SIZE:
        assert not start.advance(size)
        assert regex(r"(?s).+").advance(next(i for i in allowed(regex(r"(?s).+")) if i >= size))


def test_nothing_is_allowed_where_no_token_goes_on() -> None:
    ids = [TOKENIZER.convert_tokens_to_ids(c) for c in string.ascii_lowercase]
    far = max(ids)
    start = regex(string.ascii_lowercase[ids.index(far)], size=far)
    assert allowed(start) == []


def test_the_table_of_a_tokenizer_is_made_once_and_goes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import llguidance.hf

    made = []
    original = llguidance.hf.from_tokenizer

    def count(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", count)
    tokenizer = make_tokenizer()

    make = partial(regex_constraint, tokenizer=tokenizer, eos_token_ids=[EOS, END])
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(make, f"a{{{i}}}", vocab_size=SIZE + i) for i in range(1, 9)]
        assert [len(job.result().mask()) for job in jobs] == [SIZE + i for i in range(1, 9)]
    assert len(made) == 1
    json_schema_constraint({}, tokenizer, vocab_size=SIZE, eos_token_ids=[EOS])
    assert len(made) == 1
    entries = len(grammar_tokens._tables)
    gone = weakref.ref(tokenizer)
    del tokenizer, make, jobs
    gc.collect()
    assert gone() is None
    assert len(grammar_tokens._tables) == entries - 1


def test_threads_may_share_a_constraint_and_its_forks() -> None:
    start = schema(PET)
    expected = [walk(schema(PET).fork(), seed) for seed in range(24)]

    def one(seed: int) -> list[int] | None:
        start.mask()
        return walk(start.fork(), seed)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(24))) == expected


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "unclosed group"),
        ("[^", "unclosed character class"),
        ("(?=a)b", "look-around"),
        (r"a\b", "lookarounds not supported"),
        (r"(a)\1", "backreferences"),
        ("a\\", "single backslash"),
        ("a\\\\\\", "single backslash"),
        (r"a[^\s\S]", "no text satisfies it"),
        ("\ud800", "surrogates"),
        (5, "must be a text"),
        (None, "must be a text"),
    ],
)
def test_a_regex_that_cannot_be_used_is_refused(pattern: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        regex(pattern)
    assert caught.value.key == "constraint.regex"
    assert caught.value.value == pattern
    assert "\n" not in str(caught.value)
    assert "start:" not in str(caught.value)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ('{"type":', "Expecting value"),
        ("[]", "no JSON object"),
        (True, "no JSON object"),
        (None, "no JSON object"),
        ({"type": "wrong"}, "Invalid type: wrong"),
        ({"properties": 5}, "properties must be an object"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "format": "unheard-of"}, "Unknown format"),
        ({"type": "array", "minItems": 5, "maxItems": 2}, "Unsatisfiable schema"),
        ({"$ref": "#"}, "no text satisfies it"),
        ({"$ref": "http://example.org/x"}, "not present"),
        ({"const": {1, 2}}, "not JSON serializable"),
        ({"const": float("nan")}, "not JSON compliant"),
        ({"x-guidance": 5}, "x-guidance is no JSON object"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(document: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        schema(document)
    assert caught.value.key == "constraint.json_schema"
    assert caught.value.value == document
    assert "\n" not in str(caught.value)
    assert "%json" not in str(caught.value)


@pytest.mark.parametrize("make", [regex, schema])
@pytest.mark.parametrize("ends", [(), [SIZE], [-1]])
def test_a_constraint_needs_an_end_of_text_token(
    make: Callable[..., Constraint], ends: Collection[int]
) -> None:
    with pytest.raises(ConfigError, match="needs an end-of-text token") as caught:
        make("{}" if make is schema else "a", ends=ends)
    assert caught.value.key == "constraint"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (regex, schema):
        with pytest.raises(ConfigError, match=re.escape('pip install "decodekit[constraints]"')):
            make("{}")


def test_a_tokenizer_that_cannot_be_used_is_refused() -> None:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    for tokenizer, end, reason in (
        (None, 0, "not a fast tokenizer"),
        (object(), 0, "not a fast tokenizer"),
        (words, 0, "decoder"),
        (TOKENIZER, SIZE + 3, "out of range"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            regex_constraint("a", tokenizer, vocab_size=SIZE + 9, eos_token_ids=[end])
        assert caught.value.key == "constraint"
        assert "\n" not in str(caught.value)


def test_a_grammar_that_gives_up_ends_the_request() -> None:
    class Matcher:
        failed = False

        def try_consume_tokens(self, tokens: list[int]) -> int:
            self.failed = True
            return 0

        def compute_bitmask(self) -> bytes:
            self.failed = True
            return bytes(SIZE)

        def is_error(self) -> bool:
            return self.failed

        def get_error(self) -> str:
            return "LexerTooComplex\n<non-verbose/>"

    vocabulary = grammar_tokens.GrammarTokens(SIZE, SIZE, (EOS,))
    broken: Any = Matcher()
    constraint = guidance._GrammarConstraint(broken, vocabulary)
    with pytest.raises(GenerationError, match="LexerTooComplex"):
        constraint.mask()
    with pytest.raises(GenerationError, match="any further"):
        constraint.advance(SIZE - 1)
