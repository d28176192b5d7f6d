"""Tiny models that ``execution=native`` has kernels for; the heads of the zoo's are too small."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)

from decodekit.adapters.llama import LlamaAdapter
from decodekit.decoder.build import build_adapter
from decodekit.interfaces.plan import StepPlan

__all__ = ["CONFIGS", "alone_by", "native_adapter", "native_model", "needs_compiler"]

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="there is no C++ compiler on this machine",
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama, one kv head for six": lambda: LlamaConfig(
        **{
            **_SHAPE,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 64,
        }
    ),
    "llama, biased, tied": lambda: LlamaConfig(
        **{**_SHAPE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama, odd sizes": lambda: LlamaConfig(
        **{**_SHAPE, "hidden_size": 160, "intermediate_size": 32, "head_dim": 96, "vocab_size": 112}
    ),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=12),
    "qwen2": lambda: Qwen2Config(
        **{
            **{key: value for key, value in _SHAPE.items() if key != "head_dim"},
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
    ),
}


def native_model(kind: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a random model of one of ``CONFIGS``, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
        for parameter in model.parameters():
            # Weights as large as those of a trained model: logits differ, and no norm is all ones.
            torch.nn.init.normal_(parameter, std=0.2)
            if parameter.ndim == 1:
                parameter.data += 1
    return model.eval().to(dtype)


def native_adapter(kind: str = "llama", dtype: torch.dtype = torch.float32) -> LlamaAdapter:
    """Return an adapter over a model of its own that runs natively."""
    adapter = build_adapter(native_model(kind, dtype), adapter="llama")
    assert isinstance(adapter, LlamaAdapter)
    adapter.use_execution("native")
    return adapter


def alone_by(adapter: LlamaAdapter) -> Callable[[Sequence[int]], Tensor]:
    """Return what gives the logits [V] after tokens by the adapter itself, run alone as one chain.

    To the last bit nothing else can be the reference.
    """

    def logits(tokens: Sequence[int]) -> Tensor:
        cache = adapter.new_cache(batch=1, capacity=len(tokens))
        return adapter.forward([StepPlan(0, tuple(tokens))], cache)[0][0]

    return logits
