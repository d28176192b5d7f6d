"""A model's own forward pass over a whole text: the reference that shares no code with an adapter.

Nothing is passed but token ids: no cache, no mask, no positions, no attention of ours. So whatever
an adapter passes and a model ignores shows as a difference.

Shapes: V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.adapters.model_facts import input_device_of
from decodekit.adapters.model_lock import lock_of

__all__ = ["LARGEST", "declares", "logits_of", "plain_logits", "takes"]

LARGEST = 2**28
"""Logits that are computed at once, where the model can be asked for fewer: 1 GiB in float32."""


def declares(model: Any, argument: str) -> bool:
    """Return whether ``model.forward`` names an argument."""
    return argument in inspect.signature(model.forward).parameters


def takes(model: Any, argument: str) -> bool:
    """Return whether ``model.forward`` can be given an argument; it may still ignore it."""
    parameters = inspect.signature(model.forward).parameters
    return argument in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )


def logits_of(output: Any) -> Tensor:
    """Return the logits of what ``model.forward`` returned, an object or a tuple."""
    logits: Tensor = output[0] if isinstance(output, tuple) else output.logits
    return logits


@torch.no_grad()
def plain_logits(model: Any, tokens: Sequence[int], rows: range) -> Tensor:
    """Return the logits after some tokens of a text, [len(rows), V].

    Args:
        model: A ``transformers`` model.
        tokens: The text.
        rows: The places in it, each row's logits being those of the token that follows.
    """
    inputs: dict[str, Any] = {"use_cache": False} if takes(model, "use_cache") else {}
    all_of_them = len(tokens) * int(model.config.vocab_size)
    if all_of_them > LARGEST and declares(model, "logits_to_keep"):
        inputs["logits_to_keep"] = torch.tensor(list(rows), device=input_device_of(model))
    ids = torch.tensor([list(tokens)], device=input_device_of(model))
    with lock_of(model):
        logits = logits_of(model(input_ids=ids, **inputs))[0]
    return logits if len(logits) < len(tokens) else logits[rows.start : rows.stop]
