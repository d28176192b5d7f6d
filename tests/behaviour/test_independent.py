"""The second reference of a certificate: the model's own forward pass, without any adapter."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import Decoder
from decodekit.adapters.llama import LlamaAdapter
from decodekit.cli.main import main
from decodekit.cli.verify.independent import compare_with_the_model
from decodekit.strategies.autoregressive import Autoregressive
from decodekit.testing import ToyAdapter
from tests.support.tiny import own_model, random_prompt, tiny_model

PROMPT = random_prompt(17)


class Wrong(LlamaAdapter):
    """Wrong in the same way whatever a pass holds, from the 20th token on."""

    @torch.inference_mode()
    def forward(self, plans: Any, cache: Any) -> list[Tensor]:
        logits = super().forward(plans, cache)
        for rows, plan in zip(logits, plans, strict=True):
            for row, position in zip(rows, plan.positions[plan.anchor_row :], strict=True):
                if position >= 20:
                    row[7] += 50.0
        return logits


def judged(decoder: Decoder, prompt: list[int], **options: Any) -> Any:
    answer = decoder.generate(prompt, **options)
    return compare_with_the_model(decoder, prompt, answer, tolerance=1e-3, **options)


def reference(model: Any, **settings: Any) -> Decoder:
    return Decoder.from_model(model, strategy="autoregressive", **settings)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    {"stop_token_ids": [7], "logits_processor": lambda *given: given[-1] * 0.9},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "sampled", "shaped", "processor"])
@pytest.mark.parametrize("execution", ["eager", "packed"])
def test_every_token_of_an_answer_is_the_models_own(
    options: dict[str, Any], execution: str
) -> None:
    decoder = reference(own_model(), execution=execution)
    verdict = judged(decoder, PROMPT, max_new_tokens=16, **options).verdict
    assert (verdict.kind, verdict.divergences) == ("equal", ())
    assert verdict.tokens > 0


@pytest.mark.parametrize("options", OPTIONS[:3], ids=["greedy", "sampled", "shaped"])
def test_an_adapter_that_is_wrong_for_every_strategy_alike_is_a_defect(
    options: dict[str, Any],
) -> None:
    adapter = Wrong(own_model(), tiny_backend())
    decoder = Decoder(adapter, strategy=Autoregressive())
    other = decoder.with_strategy("lookahead")
    options = {"max_new_tokens": 16, **options}
    answer = decoder.generate(PROMPT, **options)
    assert other.generate(PROMPT, **options).tokens == answer.tokens  # nothing to be seen there
    verdict = judged(decoder, PROMPT, **options).verdict
    assert verdict.kind == "defect"
    assert verdict.divergences[-1].position >= 20 - len(PROMPT)


def tiny_backend() -> Any:
    from decodekit.backends.sdpa import SDPABackend

    return SDPABackend()


@pytest.mark.parametrize("kind", ["phi3-longrope", "gemma2", "falcon", "deepseek_v3"])
def test_texts_across_borders_and_windows_are_the_models_own(kind: str) -> None:
    decoder = reference(tiny_model(kind))
    prompt = random_prompt(27)
    assert judged(decoder, prompt, max_new_tokens=14).verdict.kind == "equal"


def test_what_is_too_large_at_once_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = own_model()
    decoder = reference(model)
    answer = decoder.generate(PROMPT, max_new_tokens=12)
    monkeypatch.setattr("decodekit.cli.verify.independent.LARGEST", 5 * 64)
    monkeypatch.setattr("decodekit.adapters.plain_forward.LARGEST", 5 * 64)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda *given: rows.append(given[-1].shape[1]))
    verdict = compare_with_the_model(
        decoder, PROMPT, answer, tolerance=1e-3, max_new_tokens=12
    ).verdict
    assert verdict is not None
    assert verdict.kind == "equal"
    assert rows == [5, 5, 3]


def test_a_model_that_cannot_run_a_whole_text_is_no_failure() -> None:
    model = own_model()
    decoder = reference(model)
    answer = decoder.generate(PROMPT, max_new_tokens=4)

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("not enough\nmemory")

    model.forward = failing
    found = compare_with_the_model(decoder, PROMPT, answer, tolerance=1e-3, max_new_tokens=4)
    assert found.verdict is None
    assert "own forward pass over 21 tokens fails: " in str(found.reason)


def test_an_adapter_without_a_transformers_model_has_no_second_reference() -> None:
    found = judged(Decoder(ToyAdapter(), strategy=Autoregressive()), [1, 2], max_new_tokens=3)
    assert found == (None, "the adapter 'ToyAdapter' runs no transformers model")


def test_the_jobs_say_that_every_strategy_is_wrong_alike(
    capsys: pytest.CaptureFixture[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decodekit.adapters.llama.adapter.check_agreement", lambda *_: None)
    monkeypatch.setattr("decodekit.adapters.llama.LlamaAdapter", Wrong)
    settings = [f"model={checkpoint}", "prompt=a b c", "max_new_tokens=30", "execution=eager"]
    assert main(["job=verify", *settings]) == 1
    out = capsys.readouterr().out
    assert "| prompt |       1 |     30 |     1 |   0 |      0 |" in out
    assert "the model's own forward pass: 0 equal, 0 tie, 1 defect" in out
    assert "defect |" in out.splitlines()[-1]
    assert main([*settings, "compare=true", "format=json"]) == 1
    compared = json.loads(capsys.readouterr().out)["compare"]
    assert (compared["equal"], compared["independent"]["kind"]) == (True, "defect")
    assert main([*settings, "compare=true"]) == 1
    assert "the model's own forward pass: DIFFERENT from token" in capsys.readouterr().err


def test_the_reference_takes_nothing_from_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = reference(own_model())
    answer = decoder.generate(PROMPT, max_new_tokens=4)
    monkeypatch.setattr(LlamaAdapter, "forward", lambda *_: pytest.fail("the adapter ran"))
    given: list[dict[str, Any]] = []
    model = decoder.adapter.model  # type: ignore[attr-defined]
    own = model.forward

    def watched(*_: Any, **inputs: Any) -> Any:
        given.append(inputs)
        return own(**inputs)

    model.forward = watched
    found = compare_with_the_model(decoder, PROMPT, answer, tolerance=1e-3, max_new_tokens=4)
    assert found.verdict is not None
    assert found.verdict.kind == "equal"
    assert [sorted(inputs) for inputs in given] == [["input_ids", "use_cache"]]
    assert torch.equal(given[0]["input_ids"], torch.tensor([[*PROMPT, *answer.tokens]]))
