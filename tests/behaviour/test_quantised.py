"""Quantised weights run unchanged: whatever a linear layer is, the step around it is the same.

The models are loaded by ``transformers``, as a user would. GGUF is tested with the real model.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedModel,
    TorchAoConfig,
)

from decodekit import Decoder
from decodekit.adapters.execution.packed import PackedLinear
from decodekit.decoder.build import prepare_execution
from decodekit.errors import ModelSupportError
from tests.support.tiny import random_prompt
from tests.support.zoo import ZOO

PROMPT = random_prompt(20)
COUNT = 24


def int8() -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


def int4() -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    # The one of its int4 forms that a CPU can multiply with.
    return TorchAoConfig(
        quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        )
    )


def bitsandbytes(**settings: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return BitsAndBytesConfig(**settings)


KINDS: dict[str, tuple[Any, torch.dtype]] = {
    "torchao int8": (int8, torch.float32),
    "torchao int4": (int4, torch.float32),
    "bitsandbytes int8": (
        lambda: bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
        torch.float32,
    ),
    "bitsandbytes nf4": (
        lambda: bitsandbytes(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
        torch.float32,
    ),
}

every_kind = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    wide().save_pretrained(path)
    return path


@cache
def wide() -> PreTrainedModel:
    """Return a tiny model whose widths can be cut into the blocks that are quantised."""
    sizes = {**ZOO["llama"].shape, "hidden_size": 64, "intermediate_size": 128}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@cache
def loaded(kind: str, path: Path) -> PreTrainedModel:
    make, dtype = KINDS[kind]
    config = make()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=config
    ).eval()


@every_kind
def test_every_strategy_gives_the_tokens_of_generate(kind: str, saved: Path) -> None:
    model = loaded(kind, saved)
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    assert len(set(expected)) > 5
    plain = Decoder.from_model(wide()).generate(PROMPT, max_new_tokens=COUNT)
    assert expected != plain.tokens, "nothing was quantised"
    for strategy in ("autoregressive", "jacobi", "prompt_lookup", "lookahead"):
        result = Decoder.from_model(model, strategy=strategy).generate(PROMPT, max_new_tokens=COUNT)
        assert result.tokens == expected, strategy


def test_rows_that_share_their_outliers_are_refused(saved: Path) -> None:
    """LLM.int8 takes the columns in which any row of a pass has an outlier out of the product."""
    model = AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=bitsandbytes(load_in_8bit=True)
    ).eval()
    with pytest.raises(ModelSupportError, match="load it with llm_int8_threshold=0"):
        Decoder.from_model(model)


def _dynamic(dtype: torch.dtype) -> Any:
    return torch.ao.quantization.quantize_dynamic(wide(), {torch.nn.Linear}, dtype=dtype)


@pytest.mark.skipif(
    set(torch.backends.quantized.supported_engines) <= {"none"}, reason="this torch cannot quantise"
)
@pytest.mark.filterwarnings("ignore:.*(is|are) deprecated")
def test_rows_that_share_their_scale_are_refused() -> None:
    """Its greedy text alone and its text with guesses in the pass are not the same."""
    with pytest.raises(ModelSupportError, match=r"one scale for all rows.*the weights only"):
        Decoder.from_model(_dynamic(torch.qint8))
    model = _dynamic(torch.float16)  # its weights only
    texts = [
        Decoder.from_model(model, strategy=strategy).generate(PROMPT, max_new_tokens=COUNT).tokens
        for strategy in ("autoregressive", "lookahead")
    ]
    assert texts[0] == texts[1]


@every_kind
def test_packing_leaves_quantised_layers_alone(kind: str, saved: Path) -> None:
    """``execution=auto`` must neither fail on them nor unpack them."""
    model = loaded(kind, saved)
    before = Decoder.from_model(model).generate(PROMPT, max_new_tokens=COUNT).tokens
    prepare_execution(model, "auto")
    packed = [name for name, layer in model.named_modules() if isinstance(layer, PackedLinear)]
    assert set(packed) <= {"lm_head"}  # which the libraries do not quantise
    assert Decoder.from_model(model).generate(PROMPT, max_new_tokens=COUNT).tokens == before
