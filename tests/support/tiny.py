"""Tiny random transformers models, and the independent loop that every strategy must equal."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.zoo import VARIANTS, VOCABULARY, WINDOW, ZOO, Kind

__all__ = [
    "LLAMA_FAMILY",
    "TRANSFORMERS",
    "VOCABULARY",
    "WINDOW",
    "built",
    "greedy_loop",
    "logits_after",
    "random_prompt",
    "tiny_model",
]

TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])
"""Its version, for what differs there."""

KINDS = {**ZOO, **VARIANTS}


LLAMA_FAMILY = [name for name in KINDS if name.partition("-")[0] in ("llama", "mistral", "qwen2")]
"""Those that ``adapter=llama`` runs."""


@cache
def tiny_model(
    kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return a tiny random model, always the same one; tests must not change it."""
    entry = KINDS[kind]
    return built(entry, seed=seed or entry.seed, biased=kind in VARIANTS).to(dtype)


def built(kind: Kind, *, seed: int = 0, biased: bool = False) -> PreTrainedModel:
    """Return a new model with random weights, of biases too if it is to be ``biased``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # transformers before 5.21 takes sdpa where that leaves out what the model asks for.
        own = None if kind.sdpa else "eager"
        model = AutoModelForCausalLM.from_config(kind.config(), attn_implementation=own)
        for name, parameter in model.named_parameters():
            # Far larger than in real models: otherwise a random model repeats one token for ever.
            # Biases are zeros otherwise, which would hide that one is left out.
            if parameter.ndim > 1 or "sink" in name or (biased and name.endswith("bias")):
                torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


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
