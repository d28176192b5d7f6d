"""Each processor against the one of ``transformers``, or against its definition in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from decodekit.engine.processors import (
    BadWords,
    LogitBias,
    MinNewTokens,
    NoRepeatNGram,
    OccurrencePenalty,
    RepetitionPenalty,
    SuppressTokens,
    processors_of,
)
from decodekit.errors import ConfigError
from decodekit.interfaces.logits import LogitsProcessor

V = 5  # small, so that tokens and n-grams come again
INF = math.inf

token_ids = st.integers(0, V - 1)
penalties = st.floats(0.1, 3.0)
Case = tuple[Tensor, Tensor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Prefixes [B, L] and scores [B, V]; some scores are 0 or -inf."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    score = st.one_of(st.floats(-9, 9, width=32), st.sampled_from([0.0, -INF]))
    ids = [draw(st.lists(token_ids, min_size=length, max_size=length)) for _ in range(rows)]
    scores = [draw(st.lists(score, min_size=V, max_size=V)) for _ in range(rows)]
    return torch.tensor(ids), torch.tensor(scores, dtype=torch.float32)


def apply(processor: LogitsProcessor, case: Case) -> Tensor:
    """Return what the processor makes of the case, and see that the case is as it was."""
    ids, scores = case
    given_ids, given_scores = ids.clone(), scores.clone()
    changed = processor(ids, scores)
    assert torch.equal(ids, given_ids)
    assert torch.equal(scores, given_scores)
    assert (changed.shape, changed.dtype) == (scores.shape, scores.dtype)
    return changed


def same(ours: LogitsProcessor, theirs: Callable[..., Any], case: Case) -> None:
    ids, scores = case
    torch.testing.assert_close(apply(ours, case), theirs(ids, scores.clone()), rtol=0, atol=0)


def scores_after(processor: LogitsProcessor, prefix: Sequence[int], scores: Sequence[float]) -> Any:
    case = torch.tensor([prefix], dtype=torch.int64), torch.tensor([scores], dtype=torch.float32)
    return apply(processor, case)[0].tolist()


def banned(processor: LogitsProcessor, prefix: Sequence[int], vocabulary: int = V) -> set[int]:
    """Return the tokens that have -inf after ``prefix``; the others must keep their 0."""
    scores = scores_after(processor, prefix, [0.0] * vocabulary)
    assert set(scores) <= {0.0, -INF}
    return {token for token, score in enumerate(scores) if score == -INF}


# --- repetition ----------------------------------------------------------------------------------


@given(cases(), penalties)
def test_the_repetition_penalty_is_that_of_transformers(case: Case, penalty: float) -> None:
    same(RepetitionPenalty(penalty), RepetitionPenaltyLogitsProcessor(penalty), case)


def test_a_repeated_token_is_penalised_once_and_away_from_its_sign() -> None:
    changed = scores_after(RepetitionPenalty(2.0), [0, 1, 0], [4.0, -4.0, 4.0, -4.0])
    assert changed == [2.0, -8.0, 4.0, -4.0]


# --- presence and frequency ----------------------------------------------------------------------


@given(cases(), st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 22))
def test_the_occurrence_penalties_count_the_tokens_after_the_prompt(
    case: Case, presence: float, frequency: float, prompt_length: int
) -> None:
    ids, scores = case
    expected = scores.tolist()
    for row, prefix in zip(expected, ids.tolist(), strict=True):
        for token in range(V):
            count = prefix[prompt_length:].count(token)
            row[token] -= frequency * count + presence * (count > 0)
    penalty = OccurrencePenalty(presence=presence, frequency=frequency, prompt_length=prompt_length)
    torch.testing.assert_close(apply(penalty, case), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_presence_is_taken_off_once_and_frequency_each_time() -> None:
    prefix = [3, 3, 0, 1, 1]
    presence = OccurrencePenalty(presence=0.5, frequency=0.0, prompt_length=2)
    frequency = OccurrencePenalty(presence=0.0, frequency=0.5, prompt_length=2)
    assert scores_after(presence, prefix, [1.0] * 4) == [0.5, 0.5, 1.0, 1.0]
    assert scores_after(frequency, prefix, [1.0] * 4) == [0.5, 0.0, 1.0, 1.0]


# --- n-grams -------------------------------------------------------------------------------------


@given(cases(), st.integers(1, 5))
def test_the_n_gram_ban_is_that_of_transformers(case: Case, size: int) -> None:
    same(NoRepeatNGram(size), NoRepeatNGramLogitsProcessor(size), case)


@pytest.mark.parametrize(
    ("size", "prefix", "expected"),
    [
        (1, [2], {2}),
        (1, [2, 0, 2], {0, 2}),
        (2, [2], set()),  # no bigram yet
        (2, [2, 2], {2}),
        (2, [0, 1, 0, 2, 0], {1, 2}),
        (3, [0, 1], set()),
        (3, [0, 1, 2], set()),
        (3, [0, 1, 2, 0, 1], {2}),
        (3, [0, 1, 2, 1, 0], set()),  # only the order tells these apart
        (4, [2], set()),
    ],
)
def test_the_token_that_repeats_an_n_gram_is_banned(
    size: int, prefix: list[int], expected: set[int]
) -> None:
    assert banned(NoRepeatNGram(size), prefix) == expected


# --- bad words -----------------------------------------------------------------------------------


@given(cases(), st.data())
def test_the_ban_of_bad_words_is_that_of_transformers(case: Case, data: st.DataObject) -> None:
    # Some versions of transformers pass over a sequence that is longer than the prefix.
    longest = min(case[0].shape[1], 4)
    sequence = st.lists(token_ids, min_size=1, max_size=longest)
    sequences = data.draw(st.lists(sequence, min_size=1, max_size=6))
    same(BadWords(sequences), NoBadWordsLogitsProcessor(sequences), case)


@given(cases(), st.lists(st.lists(token_ids, min_size=1, max_size=4), max_size=6))
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(
    case: Case, sequences: list[list[int]]
) -> None:
    ids, scores = case
    expected = scores.clone()
    for row, prefix in enumerate(ids.tolist()):
        for *head, last in sequences:
            if prefix[len(prefix) - len(head) :] == head and len(head) <= len(prefix):
                expected[row, last] = -INF
    assert torch.equal(apply(BadWords(sequences), case), expected)


def test_a_bad_word_longer_than_the_prefix_by_one_is_banned() -> None:
    words = BadWords([(0, 1, 2), (1, 3), (4,)])
    assert banned(words, [0, 1]) == {2, 3, 4}
    assert banned(words, [1]) == {3, 4}
    assert banned(words, [2]) == {4}


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        BadWords([(1,), ()])
    assert caught.value.key == "sampling.bad_words"


# --- biases and bans -----------------------------------------------------------------------------


@given(cases(), st.dictionaries(token_ids, st.floats(-9, 9) | st.just(-INF)))
def test_a_bias_is_added(case: Case, biases: dict[int, float]) -> None:
    expected = case[1] + torch.tensor([biases.get(token, 0.0) for token in range(V)])
    assert torch.equal(apply(LogitBias(biases), case), expected)


@given(cases(), st.lists(token_ids))
def test_the_suppressed_tokens_are_those_of_transformers(case: Case, ids: list[int]) -> None:
    same(SuppressTokens(ids), SuppressTokensLogitsProcessor(ids), case)


@given(cases(), st.integers(0, 8), st.integers(0, 20), st.lists(token_ids, min_size=1))
def test_the_least_length_is_that_of_transformers(
    case: Case, count: int, prompt_length: int, ends: list[int]
) -> None:
    ours = MinNewTokens(count, prompt_length=prompt_length, end_ids=ends)
    same(ours, MinNewTokensLengthLogitsProcessor(prompt_length, count, ends), case)


def test_the_end_is_allowed_after_exactly_so_many_tokens() -> None:
    least = MinNewTokens(2, prompt_length=3, end_ids={1, 4})
    assert banned(least, [0] * 3) == {1, 4}
    assert banned(least, [0] * 4) == {1, 4}
    assert banned(least, [0] * 5) == set()


# --- all of them ---------------------------------------------------------------------------------

ALL: list[LogitsProcessor] = [
    LogitBias({0: 1.5, 2: -1.5}),
    RepetitionPenalty(1.5),
    OccurrencePenalty(presence=0.5, frequency=0.25, prompt_length=1),
    NoRepeatNGram(2),
    BadWords([(1, 2), (0,)]),
    MinNewTokens(100, prompt_length=1, end_ids=[3]),
    SuppressTokens([1]),
]


def name_of(processor: LogitsProcessor) -> str:
    return type(processor).__name__


@pytest.mark.parametrize("processor", ALL, ids=name_of)
@given(case=cases())
def test_a_row_is_changed_by_its_own_prefix_alone(processor: LogitsProcessor, case: Case) -> None:
    ids, scores = case
    alone = [processor(ids[[row]], scores[[row]]) for row in range(len(ids))]
    assert torch.equal(processor(ids, scores), torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("processor", ALL, ids=name_of)
def test_scores_keep_their_type(processor: LogitsProcessor, dtype: torch.dtype) -> None:
    ids, scores = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[1.0, -1.0, 2.0, 3.0, 0.5]])
    changed = apply(processor, (ids, scores.to(dtype)))
    torch.testing.assert_close(changed.double(), processor(ids, scores).double(), rtol=1e-2, atol=0)
    assert not torch.equal(changed, scores.to(dtype))


@pytest.mark.parametrize(
    "processor",
    [
        LogitBias({V: 9.0, V + 3: 9.0}),
        RepetitionPenalty(2.0),
        OccurrencePenalty(presence=1.0, frequency=1.0, prompt_length=0),
        NoRepeatNGram(1),
        BadWords([(V,), (V + 3, V + 4)]),
        MinNewTokens(100, prompt_length=0, end_ids=[V, V + 3]),
        SuppressTokens([V, V + 3]),
    ],
    ids=name_of,
)
def test_tokens_that_the_model_cannot_produce_change_nothing(processor: LogitsProcessor) -> None:
    """The embedding, and the tokenizer, may have more tokens than the logits."""
    scores = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert scores_after(processor, [V, V + 1, V, V + 3], scores) == scores


def test_a_bad_word_may_start_with_a_token_that_the_model_cannot_produce() -> None:
    assert banned(BadWords([(V + 3, 2)]), [0, V + 3]) == {2}


# --- the factory ---------------------------------------------------------------------------------

OFF: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "logit_bias": {},
    "suppress_tokens": [],
}


def make(bad_words: Sequence[Sequence[int]] = (), **on: Any) -> list[LogitsProcessor]:
    params: Any = SimpleNamespace(**{**OFF, **on})
    return processors_of(params, prompt_length=2, end_ids=[4], bad_words=bad_words)


def test_nothing_is_made_when_nothing_is_switched_on() -> None:
    assert make() == []


@pytest.mark.parametrize(
    ("on", "kind"),
    [
        ({"repetition_penalty": 1.1}, RepetitionPenalty),
        ({"repetition_penalty": 0.9}, RepetitionPenalty),
        ({"presence_penalty": -0.1}, OccurrencePenalty),
        ({"frequency_penalty": 0.1}, OccurrencePenalty),
        ({"no_repeat_ngram_size": 1}, NoRepeatNGram),
        ({"min_new_tokens": 1}, MinNewTokens),
        ({"logit_bias": {0: 1.0}}, LogitBias),
        ({"suppress_tokens": [0]}, SuppressTokens),
        ({"bad_words": [(1,)]}, BadWords),
    ],
)
def test_each_setting_makes_its_processor_alone(on: dict[str, Any], kind: type) -> None:
    assert [type(processor) for processor in make(**on)] == [kind]


def test_the_order_is_fixed_and_the_settings_arrive() -> None:
    made = make(
        suppress_tokens=[2],
        logit_bias={1: 3.0},
        min_new_tokens=2,
        no_repeat_ngram_size=3,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        repetition_penalty=1.5,
        bad_words=[(1, 3)],
    )
    bias, repetition, occurrence, ngram, words, least, suppress = made
    assert scores_after(bias, [0], [0.0, 1.0]) == [0.0, 4.0]
    assert repetition == RepetitionPenalty(1.5)
    assert occurrence == OccurrencePenalty(presence=0.5, frequency=0.25, prompt_length=2)
    assert ngram == NoRepeatNGram(3)
    assert banned(words, [1]) == {3}
    assert banned(least, [0, 0, 0]) == {4}
    assert banned(least, [0, 0, 0, 0]) == set()
    assert banned(suppress, [0]) == {2}


@given(cases(), penalties)
def test_a_list_of_transformers_takes_ours(case: Case, penalty: float) -> None:
    ours = make(repetition_penalty=penalty, no_repeat_ngram_size=2, suppress_tokens=[3])
    theirs = [
        RepetitionPenaltyLogitsProcessor(penalty),
        NoRepeatNGramLogitsProcessor(2),
        SuppressTokensLogitsProcessor([3]),
    ]
    ids, scores = case
    mixed = LogitsProcessorList(ours)(ids, scores)
    assert torch.equal(mixed, LogitsProcessorList(theirs)(ids, scores.clone()))
