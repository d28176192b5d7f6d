"""Tiny random transformers models, and the independent loop that every strategy must equal."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)

VOCABULARY = 64
WINDOW = 12

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    # Far larger than in real models: otherwise a random model repeats one token for ever.
    "initializer_range": 0.6,
}

_CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    # The variants of the LLaMA family, one feature each.
    "llama-linear": lambda: _llama(rope={"rope_type": "linear", "factor": 2.0}),
    "llama-llama3": lambda: _llama(
        rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "llama-yarn": lambda: _llama(
        rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    ),
    "llama-one-kv-head": lambda: _llama(num_key_value_heads=1),
    "llama-no-groups": lambda: _llama(num_key_value_heads=4),
    "llama-wide-heads": lambda: _llama(head_dim=16),
    "llama-biased": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-gelu": lambda: _llama(hidden_act="gelu_pytorch_tanh"),
    "mistral-full": lambda: MistralConfig(**_SHAPE, sliding_window=None),
    "qwen2-full": lambda: Qwen2Config(**_SHAPE),
    "gemma2": lambda: Gemma2Config(**_SHAPE, head_dim=8, sliding_window=WINDOW),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.6,
    ),
}


LLAMA_FAMILY = [
    name for name in _CONFIGS if name.partition("-")[0] in ("llama", "mistral", "qwen2")
]
"""Those that ``adapter=llama`` runs."""


def _llama(*, rope: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})}
    return LlamaConfig(**{**_SHAPE, **changes}, rope_parameters=parameters)


@cache
def tiny_model(
    kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return a tiny random model, always the same one; tests must not change it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_CONFIGS[kind]())
        if "-" in kind:
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # zeros otherwise, which would hide a bias left out
                    torch.nn.init.normal_(parameter)
    return model.to(dtype).eval()


def own_model(kind: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny model that a test may change."""
    return copy.deepcopy(tiny_model(kind, dtype=dtype))


@torch.no_grad()
def logits_after(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [V] after ``tokens``: everything anew, no cache, the model's own mask."""
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


def greedy_loop(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    eos: Sequence[int] = (),
) -> list[int]:
    """Decode greedily, one token per full forward pass: what every strategy must equal."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        token = int(logits_after(model, [*prompt, *tokens]).argmax())
        tokens.append(token)
        if token in eos:
            break
    return tokens


def random_prompt(length: int, *, seed: int = 0) -> list[int]:
    """Return a prompt of random tokens that repeats itself here and there."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    half = length // 2
    return tokens[:half] + tokens[: length - half]
