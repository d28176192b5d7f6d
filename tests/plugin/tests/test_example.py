"""The plugin's own tests: decodekit's conformance suites, and its command line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit_example import WordsConfig
from decodekit_example.adapter import ByteAdapter
from decodekit_example.backend import MergedBackend
from decodekit_example.loading import load
from decodekit_example.model import ByteModel
from decodekit_example.strategy import Words
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decodekit import Decoder
from decodekit.cli.main import main
from decodekit.testing import check_adapter, check_backend, check_proposer


def random_model() -> ByteModel:
    """Return a model with weights so large that every token matters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ByteModel()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.4)
    return model.eval().requires_grad_(False)


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def test_the_adapter_keeps_the_laws() -> None:
    from decodekit.backends.sdpa import SDPABackend

    model = random_model()

    def reference(tokens: Any) -> Tensor:
        rows = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], causal)
        return model.logits(rows[0, -1])

    for backend in (SDPABackend(), MergedBackend()):
        check_adapter(ByteAdapter(model, backend), reference=reference)


def test_the_backend_keeps_the_laws() -> None:
    check_backend(MergedBackend(), dtypes=(torch.float64, torch.float32, torch.bfloat16))


@pytest.mark.parametrize("settings", [{}, {"num_tokens": 3, "min_letters": 2}])
def test_the_strategy_keeps_the_laws(settings: dict[str, int]) -> None:
    strategy = Words(WordsConfig(**settings))
    check_proposer(strategy)
    check_proposer(strategy, adapter=ByteAdapter(random_model(), MergedBackend()))


def test_words_save_steps_and_change_nothing() -> None:
    decoder = Decoder.from_config(model="example-bytes", strategy="words", backend="merged")
    assert isinstance(decoder.adapter, ByteAdapter)
    result = decoder.generate("The model ", max_new_tokens=120)
    plain = decoder.with_strategy("autoregressive").generate("The model ", max_new_tokens=120)
    assert result.tokens == plain.tokens
    assert result.stats.steps < plain.stats.steps


def test_a_built_model_is_taken_as_it_is() -> None:
    model, tokenizer = load(None, dtype="float64", device="cpu")
    decoder = Decoder.from_model(model, tokenizer, adapter="example-bytes", strategy="words")
    assert decoder.generate("The ", max_new_tokens=9).text


def test_the_settings_files_are_choices() -> None:
    for choice, num_tokens in (("words", 8), ("words-long", 16)):
        decoder = Decoder.from_config(model="example-bytes", strategy=choice)
        assert decoder.strategy.max_nodes == num_tokens


def test_a_wrong_weights_file_is_one_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    arguments = ["model=example-bytes", f"model.path={tmp_path}/x.safetensors", "prompt=x"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "x.safetensors has no weights of this model: " in error
    assert error.count("\n") == 1
