"""What a ``transformers`` model and its configuration say that decoding has to know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = [
    "eos_token_ids_of",
    "input_device_of",
    "is_in_training",
    "is_transformers_model",
    "max_positions_of",
]

_SAME_IN_TRAINING = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.Identity,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
)


def is_transformers_model(model: Any) -> bool:
    """Return whether a model is a ``PreTrainedModel``; ``transformers`` need not be loaded."""
    return any(
        (kind.__module__, kind.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for kind in type(model).__mro__
    )


def is_in_training(model: nn.Module) -> bool:
    """Return whether a part of a model is in training mode that may do something else there.

    A plain layer that was put in by hand is in training mode unless somebody says otherwise.
    """
    return any(
        module.training
        and type(module) not in _SAME_IN_TRAINING
        and not type(module).__module__.startswith("decodekit.")  # a packed layer
        for module in model.modules()
    )


def max_positions_of(model: Any) -> int | None:
    """Return the positions that a model was made for; None if its configuration names no limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return int(limit) if limit else None


def eos_token_ids_of(model: Any) -> frozenset[int]:
    """Return the tokens that end a text: all of the generation config, else the model config's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def input_device_of(model: Any) -> torch.device:
    """Return where token ids go in.

    Where ``accelerate`` keeps the weights elsewhere between passes they lie on ``meta``, and the
    hook that fetches them knows the device.
    """
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type == "meta":
        hook = getattr(embedding, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            runs_on = getattr(each, "execution_device", None)
            if runs_on is not None:
                return torch.device(runs_on)
    return device
