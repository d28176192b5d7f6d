"""What a real request asks for, on the real small model and real prompts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from decodekit import Decoder, Request, SamplingParams
from decodekit.cli.main import main
from tests.e2e.conftest import read_data

pytestmark = pytest.mark.e2e

STRATEGIES = ("autoregressive", "prompt_lookup", "lookahead")
COUNT = 40


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return one prompt of each of four kinds."""
    return [record["input_ids"] for record in read_data("peers20")[::5]]


def test_penalties_are_those_of_transformers(
    decoder: Decoder, plain_model: Any, prompts: list[list[int]]
) -> None:
    for prompt in prompts:
        ids = torch.tensor([prompt])
        expected = plain_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=COUNT,
            repetition_penalty=1.2,
            no_repeat_ngram_size=4,
        )[0, len(prompt) :].tolist()
        for strategy in STRATEGIES:
            result = decoder.with_strategy(strategy).generate(
                prompt, max_new_tokens=COUNT, repetition_penalty=1.2, no_repeat_ngram_size=4
            )
            assert result.tokens == expected, strategy


@pytest.mark.parametrize("strategy", ["prompt_lookup", "lookahead"])
def test_a_batch_gets_the_tokens_of_single_requests(
    decoder: Decoder, prompts: list[list[int]], strategy: str
) -> None:
    one = decoder.with_strategy(strategy)
    requests = [
        Request(prompts[0], max_new_tokens=COUNT),
        Request(prompts[1], max_new_tokens=COUNT, sampling=SamplingParams(temperature=0.8, seed=3)),
        Request(prompts[2], max_new_tokens=7),
        Request(prompts[3], max_new_tokens=COUNT, stop="\n\n", logprobs=1),
    ]
    for request, result in zip(requests, one.generate(requests), strict=True):
        alone = one.generate(request)
        assert result.tokens == alone.tokens
        assert (result.text, result.finish_reason) == (alone.text, alone.finish_reason)


def test_log_probabilities_are_those_of_autoregressive_decoding(
    decoder: Decoder, prompts: list[list[int]]
) -> None:
    plain = decoder.with_strategy("autoregressive")
    for prompt in prompts:
        expected = plain.generate(prompt, max_new_tokens=COUNT, logprobs=3).logprobs
        found = decoder.generate(prompt, max_new_tokens=COUNT, logprobs=3).logprobs
        for one, other in zip(expected, found, strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=5e-4)
            assert [value for _, value in one.top] == pytest.approx(
                [value for _, value in other.top], abs=5e-4
            )


@pytest.mark.parametrize(
    ("prompt", "constraint", "check"),
    [
        (
            "When was the first moon landing?",
            {"regex": r"\d{4}-\d{2}-\d{2}"},
            lambda text: re.fullmatch(r"\d{4}-\d{2}-\d{2}", text),
        ),
        (
            "Describe a person as JSON with a name and an age.",
            {
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 20},
                        "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    },
                    "required": ["name", "age"],
                    "additionalProperties": False,
                }
            },
            lambda text: set(json.loads(text)) == {"name", "age"},
        ),
    ],
    ids=["regex", "schema"],
)
def test_a_constrained_answer(decoder: Decoder, prompt: str, constraint: Any, check: Any) -> None:
    for options in ({}, {"temperature": 1.0, "seed": 2}):
        plain = decoder.with_strategy("autoregressive").generate(
            prompt, max_new_tokens=60, constraint=constraint, **options
        )
        assert check(plain.text)
        assert plain.finish_reason == "eos"
        for strategy in STRATEGIES[1:]:
            result = decoder.with_strategy(strategy).generate(
                prompt, max_new_tokens=60, constraint=constraint, **options
            )
            assert result.tokens == plain.tokens


def test_a_draft_of_its_own_saves_most_passes(decoder: Decoder, prompts: list[list[int]]) -> None:
    """The same model as draft, which is always right: five tokens a pass."""
    drafted = Decoder(
        decoder.adapter,
        decoder.tokenizer,
        strategy=_self_draft(decoder),
    )
    plain = decoder.with_strategy("autoregressive")
    result = drafted.generate(prompts[0], max_new_tokens=20)
    assert result.tokens == plain.generate(prompts[0], max_new_tokens=20).tokens
    assert result.stats.steps == 4


def _self_draft(decoder: Decoder) -> Any:
    from decodekit.strategies.draft_model import DraftModel, DraftModelConfig

    class Same:
        def load_model(self, model: Any, *, backend: str, like: Any) -> Any:
            return decoder.adapter, decoder.tokenizer

    return DraftModel(DraftModelConfig(model="itself", num_tokens=4), Same())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_certificate(
    dtype: str, prompts: list[list[int]], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": str(i), "input_ids": ids}) for i, ids in enumerate(prompts)]
    file.write_text("\n".join(lines))
    code = main(
        [
            "job=verify",
            f"verify.prompts={file}",
            f"dtype={dtype}",
            f"max_new_tokens={COUNT}",
            "format=json",
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert (code, report["defect"]) == (0, 0)
    assert report["equal"] + report["tie"] == 4
    if dtype == "float32":
        assert report["equal"] == 4
