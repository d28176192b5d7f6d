"""Several answers to one prompt, other ends of a text, padded prompts, and the names of options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import Decoder, Request, SamplingParams
from decodekit.cli.main import main
from decodekit.config.option_names import EXPLAINED, RENAMED
from decodekit.engine.loop import StepRecord
from decodekit.errors import ConfigError, DecodekitError, GenerationError
from decodekit.interfaces.sampling_params import SamplingParams as Params
from tests.support.checkpoint import save_checkpoint
from tests.support.fakes import ToyAdapter, ToyCache, plain_decode, words
from tests.support.tiny import random_prompt, tiny_model

PROMPT = [3, 1, 4, 1, 5]
STRATEGIES = ["autoregressive", "lookahead", "prompt_lookup", "jacobi"]
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_new_tokens": 12}


def toy(model: Any = None, strategy: Any = "lookahead", **settings: Any) -> Decoder:
    from decodekit.decoder.build import build_strategy

    made = ToyAdapter() if model is None else model
    return Decoder(made, words(), strategy=build_strategy(strategy), **settings)


# --- samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["exact_match", "rejection"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("chunk", [2, 512])
def test_sample_i_is_what_the_seed_plus_i_gives_alone(
    strategy: str, chunk: int, verifier: str
) -> None:
    decoder = toy(strategy=strategy, prefill_chunk=chunk).with_strategy(strategy, verifier=verifier)
    samples = decoder.generate(PROMPT, n=4, logprobs=1, **DRAWN)
    alone = [decoder.generate(PROMPT, logprobs=1, **{**DRAWN, "seed": 11 + i}) for i in range(4)]
    assert [one.tokens for one in samples] == [one.tokens for one in alone]
    assert [one.logprobs for one in samples] == [one.logprobs for one in alone]
    assert len({tuple(one.tokens) for one in samples}) > 1


@pytest.mark.parametrize("adapter", ["hf", "llama"])
@pytest.mark.parametrize("strategy", ["autoregressive", "lookahead"])
def test_samples_of_a_real_model_are_those_alone(strategy: str, adapter: str) -> None:
    decoder = Decoder.from_model(tiny_model(), strategy=strategy, adapter=adapter)
    prompt = random_prompt(14, seed=3)
    samples = decoder.generate([prompt, [5], prompt[:3]], n=3, **DRAWN)
    for one, answers in zip([prompt, [5], prompt[:3]], samples, strict=True):
        for i, answer in enumerate(answers):
            assert answer.tokens == decoder.generate(one, **{**DRAWN, "seed": 11 + i}).tokens


def prompt_rows(model: ToyAdapter) -> int:
    """Return how many rows of prompts were run."""
    return sum(len(plan.pending) for plans in model.forwards for plan in plans)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_prompt_of_several_samples_is_run_once(strategy: str) -> None:
    model, prompt = ToyAdapter(), list(range(10)) * 4
    decoder = toy(model, strategy, prefill_chunk=16)
    decoder.generate(prompt, n=5, temperature=0.7, max_new_tokens=1)
    assert prompt_rows(model) == len(prompt) - 1 + 5  # and each sample its last token
    model.forwards.clear()
    # Equal prompts of a batch, too, beside others.
    batch = [[1, 2], prompt, [7], prompt, [1, 2]]
    results = decoder.generate(batch, max_new_tokens=4)
    assert [r.tokens for r in results] == [plain_decode(model, p, max_new_tokens=4) for p in batch]


def test_a_cache_that_cannot_copy_runs_each_prompt() -> None:
    class Cache:
        """Has all that a ``ToyCache`` has but ``repeat``, as caches of plugins may."""

        def __init__(self, **sizes: int) -> None:
            self.inner = ToyCache(**sizes)

        def __getattr__(self, name: str) -> Any:
            if name == "repeat":
                raise AttributeError(name)
            return getattr(self.inner, name)

    class Older(ToyAdapter):
        def new_cache(self, *, batch: int, capacity: int) -> Any:
            return Cache(batch=batch, capacity=capacity)

    model = Older()
    samples = toy(model).generate(PROMPT, n=3, **DRAWN)
    assert [one.tokens for one in samples] == [
        one.tokens for one in toy().generate(PROMPT, n=3, **DRAWN)
    ]


def test_the_forms_of_n() -> None:
    decoder = toy()
    one = decoder.generate(PROMPT, n=1, **DRAWN)
    assert [result.tokens for result in one] == [decoder.generate(PROMPT, **DRAWN).tokens]
    request = Request(PROMPT, n=2, sampling=SamplingParams(temperature=0.9, seed=2**64 - 1))
    first, second = decoder.generate(request, max_new_tokens=9)
    assert first.tokens == decoder.generate(request, n=1, max_new_tokens=9)[0].tokens
    assert second.tokens == decoder.generate(PROMPT, temperature=0.9, max_new_tokens=9).tokens
    mixed = decoder.generate([request, Request([2])], max_new_tokens=3)
    assert [isinstance(answer, list) for answer in mixed] == [True, False]
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="n must be"):
            decoder.generate(PROMPT, n=bad)
    with pytest.raises(ConfigError, match="a stream has one answer; n belongs to"):
        decoder.stream(PROMPT, n=2)


def test_a_prompt_that_is_given_up_while_it_is_shared_runs_no_further() -> None:
    model = ToyAdapter()
    decoder = toy(model, prefill_chunk=4)
    answers = [decoder.begin(list(range(10)) * 3) for _ in range(2)]
    records: list[list[StepRecord]] = list(decoder.steps(answers, lambda: len(model.forwards) == 2))
    assert records == []
    assert len(model.forwards) == 2


# --- other ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_end_of_text_may_be_ignored_or_another(strategy: str) -> None:
    text = plain_decode(ToyAdapter(), PROMPT, max_new_tokens=12)
    end = text[4]
    model = ToyAdapter(eos=[end])
    decoder = toy(model, strategy)
    ended = text[: text.index(end) + 1]
    assert decoder.generate(PROMPT, max_new_tokens=12).tokens == ended
    ignored = decoder.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    assert (ignored.tokens, ignored.finish_reason) == (text, "length")
    other = next(token for token in text[5:] if token != end)
    for given in (other, [other], torch.tensor([other])):
        result = decoder.generate(PROMPT, max_new_tokens=12, eos_token_id=given)
        assert (result.tokens, result.finish_reason) == (text[: text.index(other) + 1], "eos")


def test_another_end_of_text_is_the_one_that_min_new_tokens_bans() -> None:
    text = plain_decode(ToyAdapter(), PROMPT, max_new_tokens=12)
    decoder = toy(ToyAdapter(eos=[text[0]]))
    result = decoder.generate(PROMPT, max_new_tokens=6, eos_token_id=text[1], min_new_tokens=6)
    assert result.tokens[0] == text[0]
    assert text[1] not in result.tokens[:5]
    free = decoder.generate(PROMPT, max_new_tokens=6, ignore_eos=True, min_new_tokens=6)
    assert free.tokens == text[:6]


@pytest.mark.parametrize("strategy", ["autoregressive", "lookahead"])
def test_other_ends_give_what_they_give_in_transformers(strategy: str) -> None:
    model, prompt = tiny_model(), random_prompt(9)
    decoder = Decoder.from_model(model, strategy=strategy)
    text = decoder.generate(prompt, max_new_tokens=12, ignore_eos=True).tokens
    ends = [text[5], text[8]]
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 9, dtype=torch.long),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=ends,
        pad_token_id=0,
    )
    result = decoder.generate(prompt, max_new_tokens=12, eos_token_id=ends)
    assert result.tokens == expected[0, 9:].tolist()


@pytest.mark.parametrize("given", [-1, 11, [], [1, "a"], "3", True, 1.0])
def test_an_end_of_text_that_is_no_token(given: Any) -> None:
    with pytest.raises(ConfigError, match="eos_token_id must be a token id of the model") as caught:
        toy().generate(PROMPT, eos_token_id=given)
    assert caught.value.key == "eos_token_id"


def test_ignore_eos_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="ignore_eos must be true or false, not 'yes'"):
        toy().generate(PROMPT, ignore_eos="yes")


# --- padding -------------------------------------------------------------------------------------

ROWS = [[3, 1, 4], [1], [5, 9, 2, 6, 5]]


def padded(side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, ROWS))
    ids, mask = [], []
    for row in ROWS:
        gap = width - len(row)
        ids.append([0] * gap + row if side == "left" else row + [0] * gap)
        mask.append([0] * gap + [1] * len(row) if side == "left" else [1] * len(row) + [0] * gap)
    return torch.tensor(ids), torch.tensor(mask)


@pytest.mark.parametrize("strategy", ["autoregressive", "lookahead"])
def test_padded_prompts_give_what_they_give_alone_and_in_transformers(strategy: str) -> None:
    model = tiny_model()
    decoder = Decoder.from_model(model, strategy=strategy)
    alone = [decoder.generate(row, max_new_tokens=8).tokens for row in ROWS]
    for side in ("left", "right"):
        ids, mask = padded(side)
        for mapping in (
            {"input_ids": ids, "attention_mask": mask},
            {"input_ids": ids.numpy(), "attention_mask": mask.bool().numpy()},
            {"input_ids": ids.tolist(), "attention_mask": mask.tolist()},
            {"input_ids": list(ids), "attention_mask": list(mask)},
        ):
            for results in (
                decoder.generate(mapping, max_new_tokens=8),
                decoder.generate(**mapping, max_new_tokens=8),
                decoder.generate(
                    mapping["input_ids"],
                    attention_mask=mapping["attention_mask"],
                    max_new_tokens=8,
                ),
            ):
                assert [result.tokens for result in results] == alone
                assert [result.prompt_tokens for result in results] == ROWS
    ids, mask = padded("left")
    generated = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=8, pad_token_id=0
    )
    ends = model.generation_config.eos_token_id
    assert ends is None or not any(ends in row for row in alone)
    assert generated[:, ids.shape[1] :].tolist() == alone


def test_one_padded_prompt_is_one_prompt() -> None:
    decoder = toy()
    expected = decoder.generate(PROMPT, max_new_tokens=4).tokens
    ids, mask = torch.tensor([[0, 0, *PROMPT]]), torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    for result in (
        decoder.generate(ids, attention_mask=mask, max_new_tokens=4),
        decoder.generate(ids[0], attention_mask=mask[0], max_new_tokens=4),
        decoder.generate(ids, attention_mask=mask[0], max_new_tokens=4),
        *decoder.generate([{"input_ids": ids, "attention_mask": mask}] * 2, max_new_tokens=4),
        decoder.generate([0, 0, *PROMPT], attention_mask=mask[0].tolist(), max_new_tokens=4),
        decoder.generate({"input_ids": PROMPT}, max_new_tokens=4),
        decoder.generate(
            input_ids=ids, attention_mask=mask, token_type_ids=0 * ids, max_new_tokens=4
        ),
        decoder.stream(input_ids=ids, attention_mask=mask, max_new_tokens=4).run(),
        decoder.generate([Request({"input_ids": ids, "attention_mask": mask})], max_new_tokens=4)[
            0
        ],
    ):
        assert result.tokens == expected
    (listed,) = decoder.generate({"input_ids": [PROMPT]}, max_new_tokens=4)
    assert listed.tokens == expected


@pytest.mark.parametrize(
    ("prompt", "mask", "message"),
    [
        ([1, 2, 3], [1, 0, 1], "attention_mask has a hole at place 1 of prompt 0"),
        ([[1, 2, 3], [4, 5, 6]], [[1, 1, 1], [1, 0, 1]], "hole at place 1 of prompt 1"),
        ([1, 2, 3], [1, 1], r"must have the shape of input_ids, \[3\], not \[2\]"),
        ([[1, 2]], [1, 1], r"must have the shape of input_ids, \[1, 2\], not \[2\]"),
        ([[1, 2]], [[[1, 1]]], r"must have the shape of input_ids, \[1, 2\], not \[1, 1, 2\]"),
        ([1, 2], 1, r"must have the shape of input_ids, \[2\], not \[\]"),
        ([1, 2], [0.0, -9.0], "attention_mask must hold 1 at the tokens of a prompt, else 0"),
        ([1, 2], [0, 0], "the prompt is empty"),
        ("text", [1, 1], "attention_mask goes with token ids, not with 'text'"),
        (["a", "b"], [1, 1], "attention_mask goes with token ids"),
        ({"input_ids": [1], "pixel_values": [2]}, None, "not .'pixel_values'."),
        ({"token_type_ids": [1]}, None, "a mapping has input_ids and attention_mask"),
        ({"input_ids": [1], "token_type_ids": [1]}, None, "token_type_ids other than 0"),
    ],
)
def test_a_mask_that_does_not_fit(prompt: Any, mask: Any, message: str) -> None:
    model = ToyAdapter()
    with pytest.raises(GenerationError, match=message) as caught:
        toy(model).generate(prompt, attention_mask=mask)
    assert "\n" not in str(caught.value)
    assert model.forwards == []


def test_there_is_one_prompt() -> None:
    with pytest.raises(ConfigError, match=r"give a prompt$"):
        toy().generate(max_new_tokens=3)
    with pytest.raises(ConfigError, match="give a prompt or input_ids, not both"):
        toy().generate([1], input_ids=[1])


# --- names ---------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "max_new_tokens": 3,
    "min_new_tokens": 2,
    "stop": ["<1>"],
    "temperature": 0.5,
    "seed": 3,
    "logprobs": 1,
    "n": 2,
    "eos_token_id": 4,
}


def facts(results: Any) -> list[Any]:
    answers: Sequence[Any] = results if isinstance(results, list) else [results]
    return [(one.tokens, one.finish_reason, one.logprobs) for one in answers]


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_the_name_that_others_have_for_an_option_is_taken(name: str) -> None:
    own = RENAMED[name]
    options = {"temperature": 0.9, "max_new_tokens": 9}
    options.pop(own, None)
    decoder = toy()
    expected = decoder.generate(PROMPT, **{**options, own: VALUES[own]})
    assert facts(decoder.generate(PROMPT, **{**options, name: VALUES[own]})) == facts(expected)
    with pytest.raises(ConfigError, match=f"{own}.*one option; give one of them|{name} and {own}"):
        decoder.generate(PROMPT, **{own: VALUES[own], name: VALUES[own]})
    if own in Params.__dataclass_fields__:
        with pytest.raises(ConfigError, match=f"{own} goes into sampling=SamplingParams"):
            Request(PROMPT, **{name: VALUES[own]})
    else:
        assert getattr(Request(PROMPT, **{name: VALUES[own]}), own) == VALUES[own]


def test_names_that_mean_something_else_are_explained_in_a_line() -> None:
    known = set(Request.__dataclass_fields__) | set(Params.__dataclass_fields__)
    assert not known & (set(RENAMED) | set(EXPLAINED))
    assert set(RENAMED.values()) <= known
    for name, reason in EXPLAINED.items():
        with pytest.raises(ConfigError) as caught:
            toy().generate(PROMPT, **{name: 1})
        assert str(caught.value) == f"unknown option {name!r}: {reason}"


def test_do_sample_says_whether_the_temperature_is_0() -> None:
    decoder = toy()
    greedy = decoder.generate(PROMPT, max_new_tokens=9).tokens
    drawn = decoder.generate(PROMPT, max_new_tokens=9, temperature=1.5, seed=1).tokens
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    assert decoder.generate(PROMPT, **options).tokens == greedy
    options = {"max_new_tokens": 9, "do_sample": True, "temperature": 1.5, "seed": 1}
    assert decoder.generate(PROMPT, **options).tokens == drawn != greedy
    for wrong in (
        {"do_sample": True},
        {"do_sample": False, "temperature": 1},
        {"do_sample": True, "temperature": 0},
    ):
        with pytest.raises(ConfigError, match="temperature says whether tokens are drawn"):
            decoder.generate(PROMPT, **wrong)  # type: ignore[arg-type]


def test_settings_have_other_names_too() -> None:
    from decodekit.config.compose import compose_config, compose_mapping

    assert compose_config(["max_tokens=5"]).max_new_tokens == 5
    assert compose_config(["stop_strings=a, b", "n_predict=3"]).stop == ["a, b"]
    assert compose_config(["num_return_sequences=3"]).n == 3
    assert compose_mapping({"max_tokens": 5}).max_new_tokens == 5
    for overrides, message in (
        (["temp=0.5"], "unknown key 'temp': it is sampling.temperature here"),
        (["max_tokens=5", "max_new_tokens=6"], "max_new_tokens and max_tokens are one option"),
        (["max_length=5"], "unknown option 'max_length': it counts the prompt, too"),
        (["n=2", "compare=true"], "compare looks at one answer"),
        (["n=0"], "n must be 1 or more, not 0"),
        (["job=bench", "ignore_eos=true"], "ignore_eos does nothing under job=bench"),
    ):
        with pytest.raises(DecodekitError, match=message):
            compose_config(overrides)
    with pytest.raises(ConfigError, match="stop_strings belongs to a request"):
        Decoder.from_config(stop_strings=["a"])


def test_the_command_line_prints_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model={save_checkpoint(tmp_path)}"
    asked = [model, "prompt=a b", "n=2", "sampling.temperature=0.9", "max_tokens=4", "device=cpu"]
    assert main([*asked, "execution=eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main([*asked, "execution=eager", "format=json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert lines == [f"[{i}] {record['text']}" for i, record in enumerate(records)]
    assert [record["seed"] for record in records] == [0, 1]
    assert [len(record["tokens"]) for record in records] == [4, 4]
