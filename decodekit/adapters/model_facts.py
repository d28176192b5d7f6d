"""What a ``transformers`` model and its configuration say that decoding has to know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decodekit.errors import ConfigError, require_at_least

__all__ = [
    "check_positions",
    "eos_token_ids_of",
    "input_device_of",
    "is_in_training",
    "is_transformers_model",
    "max_positions_of",
]

_OTHER_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)


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
    return model.training or any(
        module.training
        and (
            isinstance(module, _OTHER_IN_TRAINING)
            or type(module).__module__.startswith("transformers.models.")
        )
        for module in model.modules()
    )


def max_positions_of(model: Any) -> int | None:
    """Return the positions that a model has; None if its configuration names no limit.

    ``max_position_embeddings``, or what the scaling of its RoPE makes of the original length where
    that is more: the length is often left as it was. Where several kinds of layers have a RoPE
    each, those without a window count; the others never look far.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if not limit:
        return None
    parameters = _rope_of(model.config)
    groups = {name: each for name, each in parameters.items() if isinstance(each, dict)}
    if not groups:
        return _scaled(int(limit), parameters, alone=True)
    far = [each for name, each in groups.items() if name != "sliding_attention"]
    return min(_scaled(int(limit), each, alone=False) for each in far or groups.values())


def _rope_of(config: Any) -> dict[str, Any]:
    """Return what a configuration says of its RoPE; older ones of research code say less."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters: dict[str, Any] | None = getattr(config, name, None)
        if parameters:
            return parameters
    return {}


def _scaled(limit: int, parameters: dict[str, Any], *, alone: bool) -> int:
    """Return the positions that one RoPE has.

    Args:
        limit: What the configuration says.
        parameters: Of the RoPE.
        alone: Whether it is that of all layers.
    """
    factor = parameters.get("factor") or 1.0
    original = parameters.get("original_max_position_embeddings")
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind == "llama3" and original and limit > original:
        return limit  # says the length itself; the factor is about frequencies
    if kind == "linear" and not original:
        # Of several, as in Gemma 3, the configuration says the length.
        return int(limit * max(1.0, factor)) if alone else limit
    if kind in ("linear", "yarn", "longrope", "llama3") and original:
        return max(limit, int(original * factor))
    return limit


def check_positions(model: Any, count: int) -> None:
    """Check that a model can run texts of ``count`` positions.

    Raises:
        ConfigError: There is not even one, or its positions are a table that ends before.
    """
    require_at_least(count, 1, key="max_positions")
    limit = max_positions_of(model)
    has_rope = bool(_rope_of(model.config)) or hasattr(model.config, "rope_theta")
    if limit is not None and count > limit and not has_rope:
        raise ConfigError(
            f"max_positions={count} is more than the {limit} positions of the model, which come "
            "from a table; give at most that",
            key="max_positions",
            value=count,
        )


def eos_token_ids_of(model: Any) -> frozenset[int]:
    """Return the tokens that end a text: those of the generation config, as for ``generate``.

    Where a model has no such config, they are those of the model's own.
    """
    config = getattr(model, "generation_config", None) or model.config
    ids: Any = getattr(config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    if hasattr(ids, "tolist"):  # a tensor, or a number of numpy's
        ids = ids.tolist()
    return frozenset(map(int, ids if isinstance(ids, (list, tuple, set, frozenset)) else [ids]))


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
