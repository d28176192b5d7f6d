"""A constraint is on the text that the user gets: compared with ``re`` and with ``decode``."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import pytest

from decodekit.decoder.grammar import json_schema_constraint, regex_constraint
from decodekit.interfaces.logits import Constraint
from tests.support.spelling import TOKENIZERS, ids_of, says, spelled

every_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)
PATTERNS = ["(yes|no)", " (yes|no)", " ?(yes|no)", "  yes", "é漢?", "(Paris is|)", r"\s*no\s*"]


def constraint(pattern: str, kind: str, *, fresh: bool = True) -> Constraint:
    tokenizer = spelled(kind)
    return regex_constraint(
        pattern,
        tokenizer,
        vocab_size=len(tokenizer),
        eos_token_ids=[tokenizer.eos_token_id],
        fresh=fresh,
    )


def taken(start: Constraint, tokens: list[int]) -> bool:
    """Return whether tokens are allowed; the mask has to say the same of each."""
    state = start.fork()
    for token in tokens:
        allowed = bool(state.mask()[token])
        assert state.advance(token) is allowed
        if not allowed:
            return False
    return True


@every_tokenizer
def test_a_constraint_knows_tokens_that_were_added_since_the_last_one(kind: str) -> None:
    tokenizer = copy.deepcopy(spelled(kind))

    def answers() -> dict[str, bool]:
        start = regex_constraint(
            "(yes|zz)",
            tokenizer,
            vocab_size=len(tokenizer),
            eos_token_ids=[tokenizer.eos_token_id],
            fresh=True,
        )
        mask = start.mask().tolist()
        return {tokenizer.decode([token]): allowed for token, allowed in enumerate(mask)}

    before = answers()
    tokenizer.add_tokens(["zz", "yy"])
    after = answers()
    assert after.pop("zz")
    assert not after.pop("yy")
    assert after == before


@every_tokenizer
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("fresh", [True, False], ids=["answer", "continuation"])
def test_tokens_are_allowed_exactly_if_their_text_matches(
    kind: str, pattern: str, fresh: bool
) -> None:
    tokenizer = spelled(kind)
    start = constraint(pattern, kind, fresh=fresh)
    context = [] if fresh else ids_of(tokenizer, "the")
    before = tokenizer.decode(context)
    names = ["▁yes", "yes", "▁no", "no", "▁", "y", "e", "s", "▁is", "Paris", "▁Paris", "\n"]
    known = ids_of(tokenizer, *names)
    letters = tokenizer("é漢", add_special_tokens=False)["input_ids"]
    runs = [
        [],
        letters,
        letters[1:],
        *([one] for one in known),
        *([a, b] for a in known for b in known),
    ]
    runs += [[known[4], known[4], one] for one in known] + [[known[4], *letters]]
    rng = random.Random(4)
    runs += [[rng.choice(known) for _ in range(rng.randrange(3, 6))] for _ in range(60)]
    matching = 0
    for run in runs:
        text = tokenizer.decode([*context, *run], skip_special_tokens=True)
        fits = re.fullmatch(pattern, text[len(before) :]) is not None
        assert taken(start, [*run, tokenizer.eos_token_id]) is fits, (
            tokenizer.convert_ids_to_tokens(run)
        )
        matching += fits
    assert matching


@every_tokenizer
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("chat", [True, False])
def test_the_text_of_an_answer_matches(kind: str, pattern: str, chat: bool) -> None:
    tokenizer = spelled(kind)
    for seed in range(4):
        prompt = "Is it?"
        decoder = says(tokenizer, [], prompt=prompt, chat=chat)
        decoder.adapter.seed = seed  # type: ignore[attr-defined]
        # A random model would go on with blanks for ever.
        result = decoder.generate(
            prompt, chat=chat, constraint={"regex": pattern}, max_new_tokens=60
        )
        if result.finish_reason == "eos":
            assert re.fullmatch(pattern, result.text), (pattern, result.text)


@every_tokenizer
def test_the_natural_first_token_of_an_answer_is_allowed(kind: str) -> None:
    """In a chat the token for " yes" stands for "yes" where the tokenizer drops the space."""
    tokenizer = spelled(kind)
    (yes,) = ids_of(tokenizer, "▁yes")
    drops = tokenizer.decode([yes]) == "yes"
    assert drops is (kind in ("sentencepiece", "metaspace"))
    pattern = "(yes|no)" if drops else " (yes|no)"
    for strategy in ("autoregressive", "lookahead", "jacobi"):
        decoder = says(tokenizer, [yes], prompt="Is it?", chat=True, strategy=strategy)
        result = decoder.generate("Is it?", chat=True, constraint={"regex": pattern})
        assert result.tokens == [yes, tokenizer.eos_token_id]
        assert re.fullmatch(pattern, result.text)


def test_a_prompt_without_text_leaves_the_start_to_the_answer() -> None:
    tokenizer = spelled("sentencepiece")
    (yes,) = ids_of(tokenizer, "▁yes")
    decoder = says(tokenizer, [yes], prompt=[1])
    result = decoder.generate([1], constraint={"regex": "(yes|no)"})
    assert (result.text, result.tokens[0]) == ("yes", yes)


@every_tokenizer
def test_json_may_begin_with_the_token_of_a_space(kind: str) -> None:
    tokenizer = spelled(kind)
    schema: dict[str, Any] = {"enum": ["yes", "no"]}
    start = json_schema_constraint(
        schema,
        tokenizer,
        vocab_size=len(tokenizer),
        eos_token_ids=[tokenizer.eos_token_id],
        fresh=True,
    )
    for names in (['"', "yes", '"'], ["▁", '"', "y", "e", "s", '"'], ["▁yes", '"']):
        run = ids_of(tokenizer, *names)
        text = tokenizer.decode(run)
        is_json = text in (json.dumps("yes"), json.dumps("no"))
        assert taken(start, [*run, tokenizer.eos_token_id]) is is_json
