"""What a request may ask for: processors, stops, criteria, log-probabilities, and its mistakes.

Every answer is compared with a loop of ten lines that uses nothing of the decode loop, and with
``transformers`` where it has the same option. Strategies that are always right, or wrong at one
place, make accepted runs as long as they can be.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import string
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

from decodekit import Decoder
from decodekit.decoder.build import build_strategy
from decodekit.decoder.request import Request
from decodekit.engine.sampling import PositionSampler
from decodekit.errors import ConfigError, DecodekitError, GenerationError
from decodekit.interfaces import Budget, Proposal
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import TokenTree
from tests.support.fakes import (
    ByteTokenizer,
    Given,
    OracleProposer,
    RandomProposer,
    ToyAdapter,
    argmax,
    words,
)
from tests.support.tiny import VOCABULARY, logits_after, random_prompt, tiny_model

PROMPT = [3, 1, 4, 1, 5]
LONG_PROMPT = random_prompt(14, seed=3)
COUNT = 24
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 12}

STRATEGIES: dict[str, Any] = {
    "autoregressive": "autoregressive",
    "jacobi": "jacobi",
    "prompt_lookup": "prompt_lookup",
    "lookahead": "lookahead",
    "lookahead, large": {
        "name": "lookahead",
        "window_size": 15,
        "ngram_size": 5,
        "max_candidates": 15,
    },
    "lookahead, small": {
        "name": "lookahead",
        "window_size": 1,
        "ngram_size": 2,
        "max_candidates": 1,
    },
}
ORACLES = {"oracle": None, **{f"oracle, wrong at {place}": place for place in range(4)}}
every_strategy = pytest.mark.parametrize("strategy", [*STRATEGIES, *ORACLES])
every_oracle = pytest.mark.parametrize("strategy", list(ORACLES))


class Scripted(ToyAdapter):
    """A toy that says what is written: token ``i`` of ``text`` is the best at position ``i``.

    Args:
        text: The prompt and what follows it, said again and again.
    """

    def __init__(self, text: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.text = list(text)

    def logits_after(self, path: Sequence[int]) -> Tensor:
        logits = super().logits_after(path)
        logits[self.text[len(path) % len(self.text)]] = 9.0
        return logits


def strategy_of(name: str, text: Sequence[int], vocab_size: int) -> Any:
    """Return a strategy by its name; an oracle knows ``text``, the prompt and what follows."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    return Given(
        lambda: OracleProposer(text, depth=4, wrong_at=ORACLES[name], vocab_size=vocab_size)
    )


def decoder(model: Any, strategy: Any = "autoregressive", tokenizer: Any = None) -> Decoder:
    if isinstance(model, ToyAdapter):
        return Decoder(model, tokenizer, strategy=build_strategy(strategy))
    return Decoder.from_model(model, tokenizer, strategy=strategy)


def raw_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the model's logits [1, V] after ``tokens``, without any of decodekit."""
    if isinstance(model, ToyAdapter):
        return model.logits_after(tokens)[None]
    return logits_after(model, tokens)[None]


def plain_loop(
    model: Any,
    prompt: Sequence[int],
    count: int,
    processors: Sequence[Any] = (),
    *,
    sampled: dict[str, Any] | None = None,
    eos: Sequence[int] = (),
) -> list[int]:
    """Decode token by token, each processor on the whole prefix: what every strategy must give."""
    tokens: list[int] = []
    while len(tokens) < count and not (tokens and tokens[-1] in eos):
        prefix = [*prompt, *tokens]
        scores = raw_logits(model, prefix).clone()
        for processor in processors:
            scores = processor(torch.tensor([prefix]), scores)
        if sampled is None:
            tokens.append(argmax(scores[0], len(prefix)))
        else:
            tokens += PositionSampler(SamplingParams(**sampled)).choose(scores, [len(prefix)])
    return tokens


@cache
def plain_text(count: int = COUNT) -> tuple[int, ...]:
    return tuple(plain_loop(tiny_model(), LONG_PROMPT, count))


@cache
def model_with_eos(*ids: int) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model())
    model.generation_config.eos_token_id = list(ids)
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of ``transformers`` for the tiny models, with a letter or digit as a token."""
    letters = ["\u0120", "-", *string.ascii_letters, *string.digits]  # \u0120 is a space
    assert len(letters) == VOCABULARY
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


# Logits processors


def _allowed(_: int, ids: Tensor) -> list[int]:
    return [token for token in range(VOCABULARY) if (token + int(ids[-1]) + len(ids)) % 3]


def ends() -> tuple[int, ...]:
    """Return two tokens that would end the text soon, as its end-of-text tokens."""
    first = plain_text()
    return (first[2], next(token for token in first[3:] if token != first[2]))


PROCESSORS: dict[str, Callable[[], list[Any]]] = {
    "repetition penalty": lambda: [RepetitionPenaltyLogitsProcessor(1.8)],
    "no repeated n-gram": lambda: [NoRepeatNGramLogitsProcessor(1)],
    "least length": lambda: [MinNewTokensLengthLogitsProcessor(len(LONG_PROMPT), 9, list(ends()))],
    "bad words": lambda: [
        NoBadWordsLogitsProcessor([[plain_text()[1]], list(plain_text()[5:7])], list(ends()))
    ],
    "sequence bias": lambda: [
        SequenceBiasLogitsProcessor(
            {(plain_text()[0],): -9.0, (7, 9): 8.0, (LONG_PROMPT[-1], 5): 90.0}
        )
    ],
    "prefix constraint": lambda: [PrefixConstrainedLogitsProcessor(_allowed, num_beams=1)],
    "warpers": lambda: [TemperatureLogitsWarper(0.6), TopKLogitsWarper(4)],
    "watermark": lambda: [WatermarkLogitsProcessor(VOCABULARY, "cpu", bias=6.0)],
    "several": lambda: [
        NoRepeatNGramLogitsProcessor(2),
        SequenceBiasLogitsProcessor({(8,): 4.0, (plain_text()[0], 9): 5.0}),
        RepetitionPenaltyLogitsProcessor(1.4),
        PrefixConstrainedLogitsProcessor(_allowed, num_beams=1),
        TemperatureLogitsWarper(1.7),
        TopKLogitsWarper(12),
    ],
}


def processors(case: str) -> LogitsProcessorList:
    return LogitsProcessorList(PROCESSORS[case]())


def model_for(case: str) -> tuple[PreTrainedModel, tuple[int, ...]]:
    """Return the model of a case and its end-of-text tokens."""
    return (model_with_eos(*ends()), ends()) if case == "least length" else (tiny_model(), ())


@cache
def processed_text(case: str, *, sampled: bool) -> tuple[int, ...]:
    model, eos = model_for(case)
    options = SAMPLED if sampled else None
    return tuple(plain_loop(model, LONG_PROMPT, COUNT, processors(case), sampled=options, eos=eos))


@pytest.mark.parametrize("case", list(PROCESSORS))
def test_the_plain_loop_with_processors_gives_what_generate_gives(case: str) -> None:
    model, eos = model_for(case)
    generated = model.generate(
        torch.tensor([LONG_PROMPT]),
        max_new_tokens=COUNT,
        do_sample=False,
        logits_processor=processors(case),
        pad_token_id=0,
    )
    expected = processed_text(case, sampled=False)
    assert tuple(generated[0, len(LONG_PROMPT) :].tolist()) == expected
    # The processors do something here: otherwise the tests below could not fail.
    options = SAMPLED if case == "warpers" else None
    plain = tuple(plain_loop(model, LONG_PROMPT, COUNT, sampled=options, eos=eos))
    assert processed_text(case, sampled=case == "warpers") != plain


@pytest.mark.parametrize("case", list(PROCESSORS))
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@every_strategy
def test_processors_of_transformers_see_each_rows_own_prefix(
    strategy: str, case: str, sampled: bool
) -> None:
    model, _ = model_for(case)
    expected = processed_text(case, sampled=sampled)
    made = strategy_of(strategy, [*LONG_PROMPT, *expected], VOCABULARY)
    result = decoder(model, made).generate(
        LONG_PROMPT,
        max_new_tokens=COUNT,
        logits_processor=processors(case),
        **(SAMPLED if sampled else {}),
    )
    assert tuple(result.tokens) == expected
    if strategy == "oracle":
        assert result.stats.steps == math.ceil(len(expected) / 5)


def occurrence(presence: float, frequency: float, prompt_length: int) -> Callable[..., Tensor]:
    """Return the two penalties as their documentation says, one token at a time."""

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        new = input_ids[0, prompt_length:].tolist()
        for token in set(new):
            changed[0, token] -= presence + frequency * new.count(token)
        return changed

    return processor


OWN: dict[str, tuple[dict[str, Any], Callable[[], list[Any]]]] = {
    "repetition_penalty": (
        {"repetition_penalty": 1.8},
        lambda: [RepetitionPenaltyLogitsProcessor(1.8)],
    ),
    "presence_penalty": (
        {"presence_penalty": 3.5},
        lambda: [occurrence(3.5, 0, len(LONG_PROMPT))],
    ),
    "frequency_penalty": (
        {"frequency_penalty": 2.5},
        lambda: [occurrence(0, 2.5, len(LONG_PROMPT))],
    ),
    "no_repeat_ngram_size": (
        {"no_repeat_ngram_size": 1},
        lambda: [NoRepeatNGramLogitsProcessor(1)],
    ),
    "bad_words": (
        {"bad_words": []},  # as text, see below
        lambda: [NoBadWordsLogitsProcessor([[plain_text()[0]], list(plain_text()[5:7])])],
    ),
    "logit_bias": (
        {"logit_bias": {9: 6.5, 12: -math.inf}},
        lambda: [SequenceBiasLogitsProcessor({(9,): 6.5, (12,): -math.inf})],
    ),
    "suppress_tokens": (
        {"suppress_tokens": list(range(20, 60))},
        lambda: [SuppressTokensLogitsProcessor(list(range(20, 60)), device="cpu")],
    ),
    "several": (
        {
            "logit_bias": {9: 4.0},
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [30, 31],
        },
        lambda: [
            SequenceBiasLogitsProcessor({(9,): 4.0}),
            RepetitionPenaltyLogitsProcessor(1.3),
            occurrence(0.5, 0.25, len(LONG_PROMPT)),
            NoRepeatNGramLogitsProcessor(2),
            SuppressTokensLogitsProcessor([30, 31], device="cpu"),
        ],
    ),
}


@cache
def own_text(case: str, *, sampled: bool) -> tuple[int, ...]:
    _, make = OWN[case]
    options = SAMPLED if sampled else None
    return tuple(plain_loop(tiny_model(), LONG_PROMPT, COUNT, make(), sampled=options))


@pytest.mark.parametrize("case", list(OWN))
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@every_strategy
def test_the_own_processors_do_the_same_through_options(
    strategy: str, case: str, sampled: bool, tokenizer: Any
) -> None:
    options = dict(OWN[case][0])
    if case == "bad_words":
        options["bad_words"] = [
            tokenizer.decode([plain_text()[0]]),
            tokenizer.decode(plain_text()[5:7]),
        ]
    expected = own_text(case, sampled=sampled)
    made = strategy_of(strategy, [*LONG_PROMPT, *expected], VOCABULARY)
    result = decoder(tiny_model(), made, tokenizer).generate(
        LONG_PROMPT, max_new_tokens=COUNT, **options, **(SAMPLED if sampled else {})
    )
    assert tuple(result.tokens) == expected
    if not sampled:
        assert expected != plain_text()


@every_strategy
@pytest.mark.parametrize("least", [0, 1, 2, 3, 4, 5, 9])
def test_no_end_and_no_stop_token_comes_before_min_new_tokens(strategy: str, least: int) -> None:
    """The ends are two end-of-text tokens and a stop token; a longer sequence bans nothing."""
    endless = ToyAdapter(context=2)
    plain = plain_loop(endless, PROMPT, 30)
    eos, stop = [plain[1], plain[3]], plain[0]
    ban = MinNewTokensLengthLogitsProcessor(len(PROMPT), least, [*eos, stop])
    expected = plain_loop(endless, PROMPT, 30, [ban] if least else [], eos=[*eos, stop])
    assert len(expected) >= least
    followers = {after for token, after in itertools.pairwise(expected) if token == expected[0]}
    longer = [expected[0], next(token for token in range(11) if token not in followers)]
    model = ToyAdapter(context=2, eos=eos)
    made = strategy_of(strategy, [*PROMPT, *expected], model.vocab_size)
    result = decoder(model, made).generate(
        PROMPT, max_new_tokens=30, min_new_tokens=least, stop_token_ids=[stop, longer]
    )
    assert result.tokens == expected


@every_strategy
def test_processors_of_the_caller_come_after_the_own(strategy: str) -> None:
    """A bias before a penalty that multiplies is not a bias after it."""
    model = ToyAdapter()
    bias, penalty = {2: 2.5, 7: 1.5}, RepetitionPenaltyLogitsProcessor(3.0)
    own = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    expected = plain_loop(model, PROMPT, COUNT, [own, penalty])
    assert expected != plain_loop(model, PROMPT, COUNT, [penalty, own])
    made = strategy_of(strategy, [*PROMPT, *expected], model.vocab_size)
    result = decoder(model, made).generate(
        PROMPT, max_new_tokens=COUNT, logit_bias=bias, logits_processor=[penalty]
    )
    assert result.tokens == expected


class Recorder:
    """Changes scores by length and last token, and keeps the prefixes it was asked about."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.extend(input_ids.tolist())
        return scores.roll(int(input_ids[0, -1]) + input_ids.shape[1], dims=-1)


def prefixes(prompt: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Return the prefix before each of ``tokens``."""
    return [[*prompt, *tokens[:count]] for count in range(len(tokens))]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", ["toy", "llama"])
@every_strategy
def test_a_processor_is_called_once_for_each_new_token_and_for_nothing_else(
    strategy: str, model: str, sampled: bool
) -> None:
    """Rows that the walk does not reach cost nothing, in window, candidates or a wrong draft."""
    target = ToyAdapter(context=2) if model == "toy" else tiny_model()
    vocab_size = target.vocab_size if isinstance(target, ToyAdapter) else VOCABULARY
    options = SAMPLED if sampled else None
    expected = plain_loop(target, PROMPT, COUNT, [Recorder()], sampled=options)
    recorder = Recorder()
    # The last token is never a guess, as for a proposer that keeps to ``Budget.useful_depth``.
    made = strategy_of(strategy, [*PROMPT, *expected[:-1]], vocab_size)
    result = decoder(target, made).generate(
        PROMPT, max_new_tokens=COUNT, logits_processor=recorder, **(options or {})
    )
    assert result.tokens == expected
    assert recorder.prefixes == prefixes(PROMPT, expected)


def ending_at(place: int, ending: str, text: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
    """Return options that end ``text`` with the token at ``place``, and the end-of-text tokens."""
    length = len(PROMPT) + place + 1
    options: dict[str, dict[str, Any]] = {
        "eos": {},
        "length": {"max_new_tokens": place + 1},
        "stop tokens": {"stop_token_ids": [text[place - 1 : place + 1]]},
        "stop string": {"stop": f"{text[place - 1]}><{text[place]}>"},
        "criterion": {"stopping_criteria": lambda ids, _: ids.shape[1] == length},
    }
    return options[ending], [text[place]] if ending == "eos" else []


ENDINGS = ["eos", "length", "stop tokens", "stop string", "criterion"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_processor_is_not_asked_about_what_comes_after_the_end(ending: str, place: int) -> None:
    """The end is inside a run that the model would agree with."""
    text = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    options, eos = ending_at(place, ending, text)
    made = strategy_of("oracle", [*PROMPT, *text], 11)

    class Asked(Recorder):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.prefixes.extend(input_ids.tolist())
            return scores

    asked = Asked()
    model = Scripted([*PROMPT, *text], eos=eos)
    result = decoder(model, made, words()).generate(
        PROMPT, logits_processor=asked, **{"max_new_tokens": 9, **options}
    )
    assert result.tokens == text[: place + 1]
    assert asked.prefixes == prefixes(PROMPT, result.tokens)


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "lookahead"])
def test_a_processor_that_knows_no_way_past_the_end_does_no_harm(strategy: str) -> None:
    """The prompt has the end-of-text token, as chats have, so it is proposed with what follows."""
    eos, prompt = 9, [1, 2, 9, 3, 4, 1, 2, 9, 3, 4]

    def allowed(_: int, ids: Tensor) -> list[int]:
        return [] if int(ids[-1]) == eos else [1, 2, 3, 4, eos]  # transformers refuses []

    answer = [1, 2, 9]
    model = Scripted([*prompt, *answer, 3, 4], eos=[eos])
    processor = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
    result = decoder(model, strategy).generate(prompt, max_new_tokens=9, logits_processor=processor)
    assert result.tokens == answer
    assert result.finish_reason == "eos"


class EveryThird:
    """Bans the best token in every third call, and counts: a processor with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3:
            return scores
        return scores.index_fill(1, scores.argmax(dim=-1), -math.inf)


class ForkedEveryThird(EveryThird):
    def fork(self) -> ForkedEveryThird:
        return copy.copy(self)


class InOrder:
    """Fails unless a copy is asked about every prefix of its path, once and in order."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def fork(self) -> InOrder:
        return InOrder(list(self.seen))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[0].tolist()
        assert self.seen == ids[:-1], "a prefix is left out or comes twice"
        self.seen = ids
        return scores.roll(len(ids) % 4, dims=-1)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@every_strategy
def test_a_processor_with_a_state_and_fork_gives_the_same_text(
    strategy: str, sampled: bool
) -> None:
    model = ToyAdapter(context=2)
    options = SAMPLED if sampled else None
    both = [EveryThird(), InOrder(PROMPT[:-1])]
    expected = plain_loop(model, PROMPT, COUNT, both, sampled=options)
    stateless = [InOrder(PROMPT[:-1])]
    assert expected != plain_loop(model, PROMPT, COUNT, stateless, sampled=options)
    made = strategy_of(strategy, [*PROMPT, *expected], model.vocab_size)
    one, own = decoder(model, made), [ForkedEveryThird(), InOrder(PROMPT[:-1])]
    for _ in range(2):  # the caller's own keep their state, so that they can be used again
        result = one.generate(PROMPT, max_new_tokens=COUNT, logits_processor=own, **(options or {}))
        assert result.tokens == expected
        assert own[0].calls == 0
        assert own[1].seen == PROMPT[:-1]


@pytest.mark.parametrize("seed", range(6))
def test_so_it_does_in_any_tree(seed: int) -> None:
    """Random trees have the true branch, wrong ones, and equal siblings."""
    model = ToyAdapter(vocab_size=4)
    expected = plain_loop(model, [1, 2], 40, [EveryThird(), InOrder([1])])
    made = Given(
        lambda: RandomProposer(seed=seed, vocab_size=4, nodes=8, text=[1, 2, *expected]), 12
    )
    result = decoder(model, made).generate(
        [1, 2], max_new_tokens=40, logits_processor=[ForkedEveryThird(), InOrder([1])]
    )
    assert result.tokens == expected
    assert result.stats.steps < 40


def test_equal_candidates_are_asked_about_once() -> None:
    model = ToyAdapter()
    expected = plain_loop(model, PROMPT, COUNT, [Recorder()])

    class Twice(OracleProposer):
        def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
            tree = super().propose(committed, budget).tree
            both, _ = TokenTree.merge([tree, tree], dedupe=False)
            return Proposal(both.limited(nodes=budget.nodes, depth=budget.depth))

    recorder = Recorder()
    made = Given(lambda: Twice([*PROMPT, *expected[:-1]], depth=4))
    result = decoder(model, made).generate(PROMPT, max_new_tokens=COUNT, logits_processor=recorder)
    assert result.tokens == expected
    assert recorder.prefixes == prefixes(PROMPT, expected)


every_verifier = pytest.mark.parametrize("verifier", ["exact_match", "rejection"])


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@every_strategy
def test_a_processor_that_keeps_a_state_gives_what_plain_decoding_gives(
    strategy: str, sampled: bool
) -> None:
    """It needs no ``fork()``: it is called once for each token of the text, in order."""
    model, options = ToyAdapter(context=2), SAMPLED if sampled else None
    both = [EveryThird(), InOrder(PROMPT[:-1])]
    expected = plain_loop(model, PROMPT, COUNT, both, sampled=options)
    own = [EveryThird(), InOrder(PROMPT[:-1])]
    made = strategy_of(strategy, [*PROMPT, *expected], model.vocab_size)
    result = decoder(model, made).generate(
        PROMPT, max_new_tokens=COUNT, logits_processor=own, **(options or {})
    )
    assert result.tokens == expected
    assert own[0].calls == COUNT


def synthid() -> LogitsProcessorList:
    made = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[654, 400, 836], sampling_table_size=128, sampling_table_seed=0,
        context_history_size=16, device=torch.device("cpu"),
    )  # fmt: skip
    return LogitsProcessorList([TopKLogitsWarper(8), made])


def guidance() -> LogitsProcessorList:
    return LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, tiny_model())])


def counting() -> LogitsProcessorList:
    return LogitsProcessorList([EveryThird()])


@pytest.mark.parametrize("make", [synthid, guidance, counting])
@every_verifier
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_processors_with_a_state_give_what_they_give_in_transformers(
    strategy: str, verifier: str, make: Callable[[], LogitsProcessorList]
) -> None:
    model = tiny_model()
    generated = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=COUNT,
        do_sample=False,
        logits_processor=make(),
        pad_token_id=0,
    )
    one = Decoder.from_model(model, strategy=STRATEGIES[strategy], verifier=verifier)
    result = one.generate(PROMPT, max_new_tokens=COUNT, logits_processor=make())
    assert result.tokens == generated[0, len(PROMPT) :].tolist()
    assert result.tokens != list(plain_text())


@pytest.mark.parametrize("strategy", ["jacobi", "lookahead", "prompt_lookup"])
def test_rejection_asks_a_processor_about_the_text_it_writes_and_nothing_else(
    strategy: str,
) -> None:
    recorder = Recorder()
    one = Decoder.from_model(tiny_model(), strategy=strategy, verifier="rejection")
    result = one.generate(LONG_PROMPT, max_new_tokens=COUNT, logits_processor=recorder, **SAMPLED)
    assert recorder.prefixes == prefixes(LONG_PROMPT, result.tokens)


class Treasure:
    """Holds what nobody may copy, as a table of a million entries."""

    def __init__(self) -> None:
        self.table = dict.fromkeys(range(10), 0.0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    def refuse(self, *_: Any) -> Any:
        raise AssertionError("copied")

    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = __getstate__ = refuse


def test_a_processor_is_neither_copied_nor_called_beforehand() -> None:
    processor = Treasure()
    before = torch.get_rng_state()
    for strategy in ("autoregressive", "lookahead"):
        one = decoder(ToyAdapter(), strategy)
        tokens = one.generate(PROMPT, max_new_tokens=6, logits_processor=processor).tokens
        assert len(tokens) == 6
    recorder = Recorder()
    decoder(ToyAdapter()).generate(PROMPT, max_new_tokens=0, logits_processor=recorder)
    assert recorder.prefixes == []
    assert torch.equal(torch.get_rng_state(), before)


class Failing:
    """Raises or bans all tokens, instead of saying what the token at ``place`` may be."""

    def __init__(self, place: int, error: Exception | None) -> None:
        self.length = len(PROMPT) + place
        self.error = error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.length:
            return scores
        if self.error is not None:
            raise self.error
        return torch.full_like(scores, -math.inf)

    def criterion(self, input_ids: Tensor, scores: None) -> bool:
        if input_ids.shape[1] > self.length:
            raise self.error or OSError
        return False


@pytest.mark.parametrize("how", ["no token", "processor", "criterion"])
@every_verifier
@every_strategy
def test_the_run_up_to_a_failure_is_delivered_first(strategy: str, verifier: str, how: str) -> None:
    """As many tokens as plain decoding has delivered by then, alone and in a batch."""
    model, place = ToyAdapter(context=2), 7
    text = plain_loop(model, PROMPT, COUNT)
    failing = Failing(place, OSError("lost") if how == "processor" else None)
    options: dict[str, Any] = {"logits_processor": failing}
    if how == "criterion":
        options = {"stopping_criteria": failing.criterion}
    kind = GenerationError if how == "no token" else OSError
    one = decoder(model, strategy_of(strategy, [*PROMPT, *text], model.vocab_size), words())
    one = one.with_strategy(one.strategy, verifier=verifier)
    stream = one.stream(PROMPT, max_new_tokens=COUNT, logprobs=1, **options)
    seen: list[int] = []
    with pytest.raises(kind):
        seen.extend(token for chunk in stream for token in chunk.tokens)
    assert seen == stream.result.tokens == text[:place]
    assert stream.result.text == "".join(f"<{token}>" for token in text[:place])
    assert len(stream.result.logprobs or ()) == place
    assert stream.result.finish_reason == "cancelled"
    batch = [Request(PROMPT, max_new_tokens=2), Request(PROMPT, max_new_tokens=COUNT, **options)]
    with pytest.raises(kind) as caught:
        one.generate(batch)
    failure: Any = caught.value
    assert failure.sequence == 1
    assert failure.results[1].tokens == text[:place]
    assert failure.results[0].finish_reason == "length"


class Stopping:
    """Raises what would look like the end of an iteration, from wherever it is called."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        if input_ids.shape[1] > len(PROMPT) + 1:
            raise self.error
        return scores if scores is not None else False

    def fork(self) -> Stopping:
        return self

    def advance(self, token: int) -> bool:
        raise self.error

    def mask(self) -> Tensor:
        return torch.ones(11, dtype=torch.bool)


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
@pytest.mark.parametrize("key", ["logits_processor", "stopping_criteria", "constraint"])
@pytest.mark.parametrize("strategy", ["autoregressive", "lookahead"])
def test_a_stop_iteration_of_the_callers_own_is_an_error_that_names_it(
    strategy: str, key: str, error: type[Exception]
) -> None:
    with pytest.raises(GenerationError, match=f"Stopping raised {error.__name__}"):
        decoder(ToyAdapter(), strategy).generate(PROMPT, max_new_tokens=9, **{key: Stopping(error)})


def plain_function(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores.roll(input_ids.shape[1], dims=-1)


class Harmless:
    """Has attributes of many kinds, and none of them changes."""

    def __init__(self) -> None:
        self.table = torch.linspace(0, 3, 11)
        self.names = {"best": [1, 2], "worst": {3}}
        self.pattern = re.compile("a+")
        self.shift = lambda ids: int(ids[0, -1])  # cannot be pickled
        self.tokenizer = words()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.table.roll(self.shift(input_ids))

    def method(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self(input_ids, scores)


class Prepared:
    """Makes a table when it is called for the first time, as some of transformers do."""

    table: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 3, scores.shape[1])
        return scores + self.table.roll(int(input_ids[0, -1]))


class Frozen:
    __slots__ = ("shift",)

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(self.shift + input_ids.shape[1], dims=-1)


def shifted(input_ids: Tensor, scores: Tensor, *, by: int) -> Tensor:
    return scores.roll(by * input_ids.shape[1], dims=-1)


def in_place(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores[0, input_ids[0]] -= 2
    return scores


@pytest.mark.parametrize(
    "processor",
    [
        plain_function,
        lambda ids, scores: scores.roll(int(ids[0, -1]), dims=-1),
        Harmless(),
        Harmless().method,
        Prepared(),
        Frozen(3),
        partial(shifted, by=2),
        in_place,
    ],
    ids=[
        *("function", "lambda", "class", "method", "prepared", "slots", "partial", "in place"),
    ],
)
def test_a_processor_without_a_state_is_taken(processor: Any) -> None:
    model = ToyAdapter()
    expected = plain_loop(model, PROMPT, COUNT, [processor])
    assert expected != plain_loop(model, PROMPT, COUNT)
    for strategy in ("autoregressive", "lookahead", "oracle, wrong at 2"):
        made = strategy_of(strategy, [*PROMPT, *expected], model.vocab_size)
        result = decoder(model, made).generate(
            PROMPT, max_new_tokens=COUNT, logits_processor=processor
        )
        assert result.tokens == expected


@pytest.mark.parametrize("several", [list, tuple, LogitsProcessorList])
def test_several_processors_may_come_in_any_form(several: Callable[[Any], Any]) -> None:
    model, both = ToyAdapter(), [plain_function, Harmless()]
    expected = plain_loop(model, PROMPT, COUNT, both)
    assert expected != plain_loop(model, PROMPT, COUNT, both[::-1])
    result = decoder(model).generate(PROMPT, max_new_tokens=COUNT, logits_processor=several(both))
    assert result.tokens == expected


def test_a_processor_that_knows_the_texts_own_prefixes_only_is_taken() -> None:
    """A table of what may follow, as a trie has, knows nothing of tokens that it never allows."""
    after = {5: [0, 2], 0: [2, 4], 2: [4, 0], 4: [0]}

    def trie(input_ids: Tensor, scores: Tensor) -> Tensor:
        mask = torch.full_like(scores, -math.inf)
        mask[0, after[int(input_ids[0, -1])]] = 0
        return scores + mask

    model = ToyAdapter()
    expected = plain_loop(model, PROMPT, 12, [trie])
    for strategy in STRATEGIES.values():
        result = decoder(model, strategy).generate(PROMPT, max_new_tokens=12, logits_processor=trie)
        assert result.tokens == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_processor_gets_scores_of_the_models_type(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    turn = torch.eye(VOCABULARY, dtype=dtype).roll(1, dims=0)

    def turned(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores @ turn  # a product of two types is an error

    expected = plain_loop(model, PROMPT, 9, [turned])
    result = decoder(model).generate(PROMPT, max_new_tokens=9, logits_processor=turned)
    assert result.tokens == expected


@pytest.mark.parametrize(
    "wrong",
    [
        lambda scores: scores[0],
        lambda scores: scores[:, :-1],
        lambda scores: scores.repeat(2, 1),
        lambda scores: scores.tolist(),
    ],
    ids=["row", "narrow", "two rows", "list"],
)
def test_a_processor_that_returns_something_else_than_scores_is_named(wrong: Any) -> None:
    class Wrong:
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return wrong(scores)

    with pytest.raises(GenerationError, match=r"Wrong must return scores of shape \[1, 11\]"):
        decoder(ToyAdapter()).generate(PROMPT, max_new_tokens=2, logits_processor=Wrong())


def test_a_processor_that_leaves_no_token_is_an_error_of_that_step() -> None:
    def nothing_after_seven(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 7 else torch.full_like(scores, -math.inf)

    with pytest.raises(GenerationError, match="leave no token to choose from") as caught:
        decoder(ToyAdapter()).generate(
            PROMPT, max_new_tokens=9, logits_processor=nothing_after_seven
        )
    assert caught.value.step == 2


def test_each_request_of_a_batch_has_its_own_options() -> None:
    model = ToyAdapter(context=2)
    requests = [
        Request([3, 1], logits_processor=[RepetitionPenaltyLogitsProcessor(2.0)]),
        Request([7, 7, 2], sampling=SamplingParams(temperature=1.0, seed=5), stop_token_ids=[4]),
        Request([9], max_new_tokens=7, logprobs=2, stopping_criteria=[MaxLengthCriteria(5)]),
        Request([2, 2], logits_processor=ForkedEveryThird(), stop="<8>"),
    ]
    for strategy in STRATEGIES.values():
        one = decoder(model, strategy, words())
        batch = one.generate(requests, max_new_tokens=15)
        assert len(batch) == len(requests)
        for result, request in zip(batch, requests, strict=True):
            alone = one.generate(request, max_new_tokens=15)
            assert result.tokens == alone.tokens
            assert result.text == alone.text
            assert result.finish_reason == alone.finish_reason
            assert result.logprobs == alone.logprobs


# Stop tokens


def streamed(one: Decoder, prompt: Any, **options: Any) -> tuple[Any, list[str]]:
    """Return the result and the texts of the chunks, after the laws that hold for every stream."""
    stream = one.stream(prompt, **options)
    chunks = list(stream)
    result = stream.result
    assert [token for chunk in chunks for token in chunk.tokens] == result.tokens
    assert all(chunk.tokens for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == result.text
    reasons = [chunk.finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [result.finish_reason] * bool(chunks)
    if result.logprobs is not None:
        assert [entry for chunk in chunks for entry in chunk.logprobs] == result.logprobs
        assert all(len(chunk.logprobs) == len(chunk.tokens) for chunk in chunks)
        assert [entry.token for entry in result.logprobs] == result.tokens
    assert result.stats.tokens == len(result.tokens)
    return result, [chunk.text for chunk in chunks]


def first_end(tokens: Sequence[int], run: Sequence[int]) -> int:
    """Return how many of ``tokens`` there are when ``run`` is complete for the first time."""
    ends = range(len(run), len(tokens) + 1)
    return next(end for end in ends if list(tokens[end - len(run) : end]) == list(run))


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
@every_strategy
def test_a_stop_sequence_ends_the_text_wherever_runs_end(
    strategy: str, start: int, length: int
) -> None:
    """Inside an accepted run, at its end, or across two or three of them."""
    model = ToyAdapter(context=2)
    tokens = plain_loop(model, PROMPT, 30)
    run = tokens[start : start + length]
    end = first_end(tokens, run)
    made = strategy_of(strategy, [*PROMPT, *tokens], model.vocab_size)
    result, _ = streamed(
        decoder(model, made, words()), PROMPT, max_new_tokens=30, stop_token_ids=[run], logprobs=1
    )
    assert result.tokens == tokens[:end]
    assert result.text == words().decode(tokens[: end - length])
    assert result.finish_reason == "stop"


STOPS: dict[str, tuple[list[int], Any, int, int]] = {
    # What the model says, the stop tokens, how many tokens there are, how many are in the text.
    "begins inside its own beginning": ([1, 1, 1, 2, 5], [[1, 1, 2]], 4, 1),
    "begins twice": ([1, 2, 1, 2, 1, 3, 5], [[1, 2, 1, 3]], 6, 2),
    "of one token many times": ([1, 1, 1, 1, 5], [[1, 1, 1]], 3, 0),
    "alone": ([1, 2, 3], [[1]], 1, 0),
    "as a number": ([1, 2, 3], 2, 2, 1),
    "as numbers": ([1, 2, 3], [7, 3], 3, 2),
    "as a tuple": ([1, 2, 3], ((2, 3),), 3, 1),
    "numbers and sequences": ([1, 2, 3], [[1, 3], 3, (2, 2)], 3, 2),
    "short one inside a long one": ([1, 2, 3, 4], [[1, 2, 3, 4], [2, 3]], 3, 1),
    "short one at the end of a long one": ([5, 1, 2, 3], [[3], [2, 3], [1, 2, 3]], 4, 1),
    "short one at the end, first in the list": ([5, 1, 2, 3], [[1, 2, 3], [3]], 4, 1),
    "short one at the start of a long one": ([1, 2, 3], [[1, 2, 3], [1, 2]], 2, 0),
    "one fails and another goes on": ([1, 2, 4, 5, 6], [[1, 2, 3], [2, 4, 5]], 4, 1),
    "the longer one fails": ([1, 2, 3, 5, 2, 4], [[1, 2, 3, 4], [2, 4]], 6, 4),
    "the same twice": ([5, 1, 2], [[1, 2], [1, 2]], 3, 1),
}


@pytest.mark.parametrize("case", list(STOPS))
@every_strategy
def test_stop_sequences_that_overlap(strategy: str, case: str) -> None:
    says, stop, count, kept = STOPS[case]
    model = Scripted([*PROMPT, *says])
    made = strategy_of(strategy, [*PROMPT, *says], model.vocab_size)
    result, _ = streamed(
        decoder(model, made, words()), PROMPT, max_new_tokens=len(says), stop_token_ids=stop
    )
    assert result.tokens == says[:count]
    assert result.text == words().decode(says[:kept])
    assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    ("says", "stop", "texts"),
    [
        ([1, 1, 5], [[1, 1, 2]], ["", "", "<1><1><5>"]),
        ([1, 1, 1, 2], [[1, 1, 2]], ["", "", "<1>", ""]),
        ([1, 2, 1, 2, 1, 4], [[1, 2, 1, 3]], ["", "", "", "<1><2>", "", "<1><2><1><4>"]),
        ([1, 2, 4, 5], [[1, 2, 3], [2, 4, 6]], ["", "", "<1>", "<2><4><5>"]),
        ([7, 1], [[1, 2]], ["<7>", "<1>"]),  # the last token: nothing can come any more
        ([7, 8], [[9]], ["<7>", "<8>"]),  # one token alone has no beginning
        ([7, 8], [], ["<7>", "<8>"]),
    ],
)
def test_text_is_held_back_exactly_while_a_stop_sequence_may_be_under_way(
    says: list[int], stop: list[list[int]], texts: list[str]
) -> None:
    model = Scripted([*PROMPT, *says])
    _, shown = streamed(
        decoder(model, "autoregressive", words()),
        PROMPT,
        max_new_tokens=len(says),
        stop_token_ids=stop,
    )
    assert shown == texts


@pytest.mark.parametrize(
    ("eos", "budget", "positions", "reason", "text"),
    [
        # The sequence 2 3 is complete with the third token; so much else may be.
        ([], 3, None, "stop", "<1>"),
        ([], 3, 8, "stop", "<1>"),
        ([], 9, 8, "stop", "<1>"),
        ([3], 9, None, "eos", "<1><2><3>"),
        ([3], 3, 8, "eos", "<1><2><3>"),
        ([2], 9, None, "eos", "<1><2>"),
        ([], 2, None, "length", "<1><2>"),
        ([], 9, 7, "capacity", "<1><2>"),
    ],
)
@every_strategy
def test_what_ends_the_text_where_a_stop_sequence_does_too(
    strategy: str, eos: list[int], budget: int, positions: int | None, reason: str, text: str
) -> None:
    says = [1, 2, 3, 4, 5, 6]
    model = Scripted([*PROMPT, *says], eos=eos, max_positions=positions)
    made = strategy_of(strategy, [*PROMPT, *says], model.vocab_size)
    result, _ = streamed(
        decoder(model, made, words()), PROMPT, max_new_tokens=budget, stop_token_ids=[[2, 3]]
    )
    assert result.finish_reason == reason
    assert result.text == text
    assert len(result.tokens) == (2 if reason in ("length", "capacity") or eos == [2] else 3)


@pytest.mark.parametrize(
    ("stop", "sequences", "count", "text"),
    [
        ("<2>", [[3, 4]], 2, "<1>"),  # the string is first
        ("<4>", [[2, 3]], 3, "<1>"),  # the tokens are first
        ("<3>", [[2, 3]], 3, "<1>"),  # both at one token; the tokens begin first
        ("1><2><3", [[2, 3]], 3, "<"),  # both at one token; the string begins first
        ("><2", [[2, 3], [1, 2]], 2, ""),
        (["<4>", "2>"], [[4], [3, 4]], 2, "<1><"),
        ("3><5", [[3, 5]], 6, "<1><2><3><4><5><6>"),  # neither comes
    ],
)
@every_strategy
def test_stop_strings_and_stop_tokens_in_one_request(
    strategy: str, stop: Any, sequences: Any, count: int, text: str
) -> None:
    says = [1, 2, 3, 4, 5, 6]
    model = Scripted([*PROMPT, *says])
    made = strategy_of(strategy, [*PROMPT, *says], model.vocab_size)
    result, _ = streamed(
        decoder(model, made, words()),
        PROMPT,
        max_new_tokens=6,
        stop=stop,
        stop_token_ids=sequences,
        logprobs=0,
    )
    assert result.tokens == says[:count]
    assert result.text == text
    assert result.finish_reason == ("length" if count == 6 else "stop")


def test_a_character_that_the_stop_sequence_completes_is_not_whole() -> None:
    """The bytes before the sequence are in the text, so they are shown as what they are."""
    halves = ByteTokenizer([b"\xc3", b"\xa9", b"x", b"y", b"z", b"w"])
    model = Scripted([*PROMPT, 2, 0, 1, 3], vocab_size=6)
    result, _ = streamed(
        decoder(model, "autoregressive", halves),
        PROMPT,
        max_new_tokens=4,
        stop_token_ids=[[1]],
    )
    assert result.tokens == [2, 0, 1]
    assert result.text == halves.decode([2, 0]) == "x\ufffd"


def test_stop_sequences_need_no_tokenizer() -> None:
    model = Scripted([*PROMPT, 1, 2, 3])
    result = decoder(model).generate(PROMPT, max_new_tokens=3, stop_token_ids=[[1, 2]])
    assert (result.tokens, result.text, result.finish_reason) == ([1, 2], "", "stop")


def test_a_stop_sequence_does_not_begin_in_the_prompt() -> None:
    model = Scripted([*PROMPT, 2, 5, 2])
    result = decoder(model).generate(PROMPT, max_new_tokens=3, stop_token_ids=[[5, 2]])
    assert result.tokens == [2, 5, 2]


# Stopping criteria


class Calls:
    """A criterion that keeps what it was asked and says yes to the ``last`` call."""

    def __init__(self, last: int, yes: Any = True, no: Any = False) -> None:
        self.asked: list[list[int]] = []
        self.last, self.yes, self.no = last, yes, no

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        (ids,) = input_ids.tolist()
        self.asked.append(ids)
        return self.yes if len(self.asked) == self.last else self.no


@pytest.mark.parametrize("last", range(1, 10))
@every_strategy
def test_a_criterion_is_asked_after_each_token_in_order_and_once(strategy: str, last: int) -> None:
    model = ToyAdapter(context=2)
    tokens = plain_loop(model, PROMPT, COUNT)
    made = strategy_of(strategy, [*PROMPT, *tokens], model.vocab_size)
    first, second = Calls(last), Calls(99)
    result, _ = streamed(
        decoder(model, made, words()),
        PROMPT,
        max_new_tokens=COUNT,
        stopping_criteria=StoppingCriteriaList([first, second]),
    )
    assert result.tokens == tokens[:last]
    assert result.text == words().decode(tokens[:last])  # what it ends with is text
    assert result.finish_reason == "stop"
    after_each = [[*PROMPT, *tokens[:count]] for count in range(1, last + 1)]
    assert first.asked == second.asked == after_each


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        (True, False),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor(True), torch.tensor(False)),
        (np.True_, np.False_),
        (1, 0),
    ],
    ids=["bool", "tensor of one", "tensor", "numpy", "int"],
)
def test_a_criterion_may_answer_in_many_forms(yes: Any, no: Any) -> None:
    result = decoder(ToyAdapter()).generate(
        PROMPT, max_new_tokens=9, stopping_criteria=Calls(4, yes, no)
    )
    assert len(result.tokens) == 4
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("longest", [1, 2, 6, 7])
@every_strategy
def test_the_length_criterion_of_transformers_is_that_of_generate(
    strategy: str, longest: int
) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(LONG_PROMPT) + longest)])
    generated = tiny_model().generate(
        torch.tensor([LONG_PROMPT]), do_sample=False, stopping_criteria=criteria, max_new_tokens=20
    )
    expected = generated[0, len(LONG_PROMPT) :].tolist()
    assert len(expected) == longest
    made = strategy_of(strategy, [*LONG_PROMPT, *plain_text()], VOCABULARY)
    result = decoder(tiny_model(), made).generate(
        LONG_PROMPT, max_new_tokens=20, stopping_criteria=criteria
    )
    assert result.tokens == expected
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("place", [0, 1, 3, 7])
@every_strategy
def test_the_string_criterion_of_transformers_is_that_of_generate(
    strategy: str, place: int, tokenizer: Any
) -> None:
    stop = tokenizer.decode(plain_text()[place : place + 2])
    assert len(stop) == 2
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    generated = tiny_model().generate(
        torch.tensor([LONG_PROMPT]), do_sample=False, stopping_criteria=criteria, max_new_tokens=20
    )
    expected = generated[0, len(LONG_PROMPT) :].tolist()
    assert len(expected) == first_end(plain_text(), plain_text()[place : place + 2])
    made = strategy_of(strategy, [*LONG_PROMPT, *plain_text()], VOCABULARY)
    result = decoder(tiny_model(), made, tokenizer).generate(
        LONG_PROMPT, max_new_tokens=20, stopping_criteria=criteria
    )
    assert result.tokens == expected
    assert result.finish_reason == "stop"


def test_a_criterion_does_not_hide_the_end_of_text() -> None:
    model = Scripted([*PROMPT, 1, 2, 3], eos=[2])
    calls = Calls(2)
    result = decoder(model).generate(PROMPT, max_new_tokens=3, stopping_criteria=calls)
    assert (result.tokens, result.finish_reason) == ([1, 2], "eos")
    assert len(calls.asked) == 2


# Log-probabilities


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_log_probabilities_are_those_of_the_models_own_logits(
    strategy: str, kind: str, top: int, sampled: bool
) -> None:
    """Before the penalty, the ban and the temperature that the tokens are chosen with."""
    model = tiny_model(kind, dtype=torch.float64)
    result, _ = streamed(
        decoder(model, STRATEGIES[strategy]),
        LONG_PROMPT,
        max_new_tokens=16,
        logprobs=top,
        repetition_penalty=1.5,
        suppress_tokens=[plain_text()[0]],
        **(SAMPLED if sampled else {}),
    )
    assert len(result.logprobs) == 16
    for entry, prefix in zip(result.logprobs, prefixes(LONG_PROMPT, result.tokens), strict=True):
        logprobs = logits_after(model, prefix).log_softmax(dim=-1)
        assert entry.logprob == pytest.approx(float(logprobs[entry.token]), abs=1e-9)
        best = logprobs.topk(top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)


@every_strategy
def test_log_probabilities_are_equal_in_every_strategy(strategy: str) -> None:
    model = ToyAdapter(context=2)
    tokens = plain_loop(model, PROMPT, COUNT)
    made = strategy_of(strategy, [*PROMPT, *tokens], model.vocab_size)
    result, _ = streamed(decoder(model, made), PROMPT, max_new_tokens=COUNT, logprobs=3)
    plain, _ = streamed(decoder(model), PROMPT, max_new_tokens=COUNT, logprobs=3)
    assert result.logprobs == plain.logprobs
    assert all(entry.top[0] == (entry.token, entry.logprob) for entry in result.logprobs)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("place", range(1, 9))
@every_oracle
def test_log_probabilities_end_with_the_tokens(strategy: str, ending: str, place: int) -> None:
    text = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    options, eos = ending_at(place, ending, text)
    model = Scripted([*PROMPT, *text], eos=eos)
    made = strategy_of(strategy, [*PROMPT, *text], model.vocab_size)
    result, _ = streamed(
        decoder(model, made, words()),
        PROMPT,
        logprobs=2,
        **{"max_new_tokens": 9, **options},
    )
    assert result.tokens == text[: place + 1]
    for entry, prefix in zip(result.logprobs, prefixes(PROMPT, result.tokens), strict=True):
        logprobs = model.logits_after(prefix).log_softmax(dim=-1)
        assert entry.logprob == pytest.approx(float(logprobs[entry.token]), abs=1e-6)


def test_log_probabilities_of_more_tokens_than_there_are() -> None:
    result = decoder(ToyAdapter()).generate(PROMPT, max_new_tokens=3, logprobs=1000)
    for entry in result.logprobs:
        assert sorted(token for token, _ in entry.top) == list(range(11))
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) == pytest.approx(1)


def test_log_probabilities_are_reported_only_if_asked_for() -> None:
    one = decoder(ToyAdapter())
    assert one.generate(PROMPT, max_new_tokens=3).logprobs is None
    assert all(chunk.logprobs is None for chunk in one.stream(PROMPT, max_new_tokens=3))
    assert one.generate(PROMPT, max_new_tokens=0, logprobs=2).logprobs == []
    entries = one.generate(PROMPT, max_new_tokens=3, logprobs=0).logprobs
    assert [entry.top for entry in entries] == [(), (), ()]


# Why a text ends


@every_strategy
def test_every_reason_to_end(strategy: str) -> None:
    says = [1, 2, 3, 4, 5, 6]

    def reason(*, eos: Sequence[int] = (), positions: int | None = None, **options: Any) -> str:
        model = Scripted([*PROMPT, *says], eos=eos, max_positions=positions)
        made = strategy_of(strategy, [*PROMPT, *says], model.vocab_size)
        result, _ = streamed(
            decoder(model, made, words()), PROMPT, **{"max_new_tokens": 6, **options}
        )
        return str(result.finish_reason)

    assert reason(eos=[2]) == "eos"
    assert reason(stop="<2>") == "stop"
    assert reason(stop_token_ids=[2]) == "stop"
    assert reason(stopping_criteria=lambda ids, _: ids.shape[1] == 7) == "stop"
    assert reason() == "length"
    assert reason(max_new_tokens=0) == "length"
    assert reason(positions=8) == "capacity"
    assert reason(positions=11) == "length"

    model = Scripted([*PROMPT, *says])
    made = strategy_of(strategy, [*PROMPT, *says], model.vocab_size)
    stream = decoder(model, made, words()).stream(PROMPT, max_new_tokens=6)
    assert stream.result.finish_reason is None
    first = next(stream)
    stream.cancel()
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.tokens == list(first.tokens) == says[: len(first.tokens)]


@pytest.mark.parametrize(
    "options",
    [{}, {"stop": "<1><2><3><9>"}, {"stop_token_ids": [[2, 3, 9]]}],
    ids=["nothing held", "stop string under way", "stop tokens under way"],
)
def test_the_text_of_a_cancelled_stream_is_what_it_has_shown(options: dict[str, Any]) -> None:
    stream = decoder(Scripted([*PROMPT, 1, 2, 3, 4]), tokenizer=words()).stream(
        PROMPT, max_new_tokens=4, **options
    )
    shown = "".join(next(stream).text for _ in range(3))
    stream.close()
    assert stream.result.tokens == [1, 2, 3]
    assert stream.result.text == shown


# Mistakes

MISTAKES: list[tuple[str, Any, str]] = [
    ("max_new_tokens", "5", "must be a whole number, not '5'"),
    ("max_new_tokens", 2.0, "must be a whole number, not 2.0"),
    ("max_new_tokens", True, "must be a whole number, not True"),
    ("max_new_tokens", -1, "must be 0 or more, not -1"),
    ("sampling", {"temperature": 1.0}, "SamplingParams"),
    ("sampling", 5, "SamplingParams"),
    ("stop", 5, "must be strings"),
    ("stop", True, "must be strings"),
    ("stop", ["a", 5], "must be strings"),
    ("stop", b"ab", "must be strings"),
    ("stop", "", "must not be empty"),
    ("stop", ["a", ""], "must not be empty"),
    ("stop_token_ids", 11, "must be token ids of the model"),
    ("stop_token_ids", [-1], "must be token ids of the model"),
    ("stop_token_ids", [[1, 11]], "must be token ids of the model"),
    ("stop_token_ids", [[]], "must be token ids of the model"),
    ("stop_token_ids", [1.5], "must be token ids of the model"),
    ("stop_token_ids", "12", "must be token ids of the model"),
    ("stop_token_ids", [["1"]], "must be token ids of the model"),
    ("stop_token_ids", True, "must be token ids of the model"),
    ("stop_token_ids", [[True]], "must be token ids of the model"),
    ("stop_token_ids", torch.full((3, 3), 99), "must be token ids of the model"),
    ("logprobs", -1, "must be 0 or more, not -1"),
    ("logprobs", True, "must be a whole number, not True"),
    ("logprobs", "all", "must be a whole number, not 'all'"),
    ("logits_processor", 5, "must be callable, not 5"),
    ("logits_processor", [plain_function, 5], "must be callable, not 5"),
    ("logits_processor", torch.ones(3, 3), "must be callable"),
    ("stopping_criteria", 5, "must be callable, not 5"),
    ("stopping_criteria", [None], "must be callable, not None"),
    ("constraint", "a+", "a constraint is"),
    ("constraint", {"regexp": "a+"}, "a constraint is"),
    ("constraint", {"regex": "a", "json_schema": {}}, "a constraint is"),
    ("chat", "no", "chat"),
    ("temperature", "hot", "must be a number, not 'hot'"),
    ("temperature", -1, "must be 0 or more"),
    ("top_k", 1.5, "must be a whole number"),
    ("top_p", 0, r"must be in \(0, 1\]"),
    ("seed", 1.0, "must be a whole number"),
    ("repetition_penalty", 0, r"must be in \[1e-6, 1e6\], where 1 is off"),
    ("presence_penalty", math.inf, "must be at most 1e\\+38, not inf"),
    ("frequency_penalty", -1e39, "must be at most 1e\\+38, not -1e\\+39"),
    ("temperature", 10**400, "must be a number, not 1000"),
    ("presence_penalty", -(10**400), "must be a number, not -1000"),
    ("top_k", np.float64(3), "must be a whole number"),
    ("no_repeat_ngram_size", -1, "must be 0"),
    ("min_new_tokens", True, "must be a whole number"),
    ("bad_words", "a", "must be a list of texts"),
    ("bad_words", [3], "must be a list of texts"),
    ("bad_words", ["\ud800"], "must be a list of texts"),
    ("suppress_tokens", 3, "must be a list of token ids"),
    ("suppress_tokens", [-1] * 500, r"\.\.\.$"),
    ("suppress_tokens", [11], "names token 11; the model's last is 10"),
    ("logit_bias", [(1, 2.0)], "must be a mapping"),
    ("logit_bias", {1: "2"}, "must be a mapping"),
    ("logit_bias", {11: 2.0}, "names token 11; the model's last is 10"),
    ("max_new_token", 5, "did you mean 'max_new_tokens'"),
    ("stop_tokens", [5], "did you mean 'stop_token_ids'"),
    ("temprature", 1.0, "did you mean 'temperature'"),
    ("num_beams", 4, "unknown option 'num_beams'"),
]


@pytest.mark.parametrize("verdict", [None, "yes", b"", [], {}, object(), torch.ones(0)])
def test_a_criterion_that_does_not_answer_is_named(verdict: Any) -> None:
    def undecided(input_ids: Tensor, scores: Any) -> Any:
        return verdict

    with pytest.raises(GenerationError, match="criterion undecided must return whether the text"):
        decoder(ToyAdapter()).generate(PROMPT, stopping_criteria=undecided)


def test_numbers_of_numpy_are_numbers() -> None:
    from fractions import Fraction

    options = {"top_k": 3, "temperature": 0.5, "seed": 7, "suppress_tokens": [2], "top_p": 0.75}
    theirs = {
        "top_k": np.int64(3),
        "temperature": np.float32(0.5),
        "seed": np.uint64(7),
        "suppress_tokens": [np.int32(2)],
        "top_p": Fraction(3, 4),
    }
    made = decoder(ToyAdapter())
    assert made.generate(PROMPT, **theirs).tokens == made.generate(PROMPT, **options).tokens


@pytest.mark.parametrize(
    ("key", "value", "message"),
    MISTAKES,
    ids=[f"{key}={value!r:.20}" for key, value, _ in MISTAKES],
)
def test_a_mistake_in_an_option_is_one_line_with_its_name(
    key: str, value: Any, message: str
) -> None:
    model = ToyAdapter()
    with pytest.raises(ConfigError, match=message) as caught:
        decoder(model, "lookahead", words()).generate(PROMPT, **{key: value})
    assert str(caught.value.key).rpartition(".")[2] == key
    assert "\n" not in str(caught.value)
    assert model.forwards == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [mistake for mistake in MISTAKES if hasattr(Request, mistake[0])],
    ids=[f"{key}={value!r:.20}" for key, value, _ in MISTAKES if hasattr(Request, key)],
)
def test_a_mistake_in_a_request_is_too(key: str, value: Any, message: str) -> None:
    model = ToyAdapter()
    with pytest.raises(ConfigError, match=message) as caught:
        decoder(model, "lookahead", words()).generate(Request(PROMPT, **{key: value}))
    assert str(caught.value.key).rpartition(".")[2] == key
    assert "\n" not in str(caught.value)


def test_the_error_of_a_batch_names_the_prompt() -> None:
    requests = [Request(PROMPT), Request(PROMPT, logprobs=-1)]
    with pytest.raises(ConfigError, match="prompt 1 of the batch: logprobs must be") as caught:
        decoder(ToyAdapter()).generate(requests)
    assert caught.value.key == "logprobs"


@pytest.mark.parametrize(
    "options", [{"stop": "a"}, {"bad_words": ["a"]}, {"constraint": {"regex": "a"}}]
)
def test_options_on_text_need_a_tokenizer(options: dict[str, Any]) -> None:
    with pytest.raises(DecodekitError, match=r"needs? a tokenizer; give one to the Decoder"):
        decoder(ToyAdapter()).generate(PROMPT, **options)


# Requests and options together


def test_options_go_before_what_a_request_says() -> None:
    one = decoder(ToyAdapter(context=2), "lookahead", words())
    tokens = one.generate(PROMPT, max_new_tokens=12).tokens
    request = Request(
        PROMPT,
        max_new_tokens=12,
        stop=f"<{tokens[3]}>",
        stop_token_ids=[[tokens[4], tokens[5]]],
        logprobs=1,
        logits_processor=plain_function,
        stopping_criteria=Calls(7),
        sampling=SamplingParams(temperature=0.7, seed=1),
    )
    before = copy.copy(request)
    changes: dict[str, Any] = {
        "max_new_tokens": 10,
        "stop": [],
        "stop_token_ids": [tokens[8]],
        "logprobs": 2,
        "logits_processor": [],
        "stopping_criteria": [],
        "temperature": 0.0,
    }
    result = one.generate(request, **changes)
    assert result.tokens == tokens[: min(first_end(tokens, [tokens[8]]), 10)]
    assert result.finish_reason == "stop"
    assert all(len(entry.top) == 2 for entry in result.logprobs)
    assert request == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"temperature": 0.7, "seed": 1}),
        ({"seed": 2}, {"temperature": 0.7, "seed": 2}),
        ({"seed": None, "sampling": None}, {"temperature": 0.7, "seed": 1}),
        ({"top_k": 3}, {"temperature": 0.7, "seed": 1, "top_k": 3}),
        ({"sampling": SamplingParams(temperature=1.1)}, {"temperature": 1.1}),
        (
            {"sampling": SamplingParams(temperature=1.1, top_k=4), "seed": 5},
            {"temperature": 1.1, "top_k": 4, "seed": 5},
        ),
    ],
)
def test_single_settings_of_sampling_go_before_the_whole(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = ToyAdapter()
    one = Decoder(
        model,
        strategy=build_strategy("lookahead"),
        sampling=SamplingParams(temperature=0.9, seed=8, top_p=0.5),
    )
    sampling = SamplingParams(temperature=0.7, seed=1)
    result = one.generate(Request(PROMPT, sampling=sampling), max_new_tokens=20, **options)
    assert result.tokens == plain_loop(model, PROMPT, 20, sampled=expected)
    assert sampling == SamplingParams(temperature=0.7, seed=1)


def test_what_neither_says_is_as_the_decoder_has_it() -> None:
    model, own = ToyAdapter(), {"temperature": 0.9, "seed": 8}
    one = Decoder(
        model,
        strategy=build_strategy("jacobi"),
        sampling=SamplingParams(**own),
        max_new_tokens=13,
    )
    for prompt in (PROMPT, Request(PROMPT), Request(PROMPT, max_new_tokens=None)):
        assert one.generate(prompt).tokens == plain_loop(model, PROMPT, 13, sampled=own)
    changed = {**own, "seed": 9}
    assert one.generate(PROMPT, seed=9).tokens == plain_loop(model, PROMPT, 13, sampled=changed)


def test_options_hold_for_every_request_of_a_batch() -> None:
    one = decoder(ToyAdapter(context=2), "prompt_lookup")
    batch = one.generate(
        [Request([1, 2], max_new_tokens=3), Request([4]), [5, 6]], max_new_tokens=8
    )
    assert [len(result.tokens) for result in batch] == [8, 8, 8]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_everything_at_once(strategy: str, tokenizer: Any) -> None:
    """One request with all options, streamed, against the plain loop."""
    sampling = SamplingParams(**SAMPLED, repetition_penalty=1.2, min_new_tokens=4)
    made = [
        RepetitionPenaltyLogitsProcessor(1.2),
        *processors("prefix constraint"),
        EveryThird(),
    ]
    tokens = plain_loop(tiny_model(), LONG_PROMPT, 20, made, sampled=SAMPLED)
    end = first_end(tokens, tokens[11:13])
    asked = Calls(99)
    request = Request(
        LONG_PROMPT,
        sampling=sampling,
        stop=["zzzz"],
        stop_token_ids=[tokens[11:13]],
        logprobs=2,
        logits_processor=LogitsProcessorList(
            [*processors("prefix constraint"), ForkedEveryThird()]
        ),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(100), asked]),
    )
    result, _ = streamed(
        decoder(tiny_model(), STRATEGIES[strategy], tokenizer), request, max_new_tokens=20
    )
    assert result.tokens == tokens[:end]
    assert result.finish_reason == "stop"
    assert asked.asked == [[*LONG_PROMPT, *tokens[:count]] for count in range(1, end + 1)]
    assert len(result.logprobs) == end
    assert result.text == tokenizer.decode(tokens[: end - 2])
