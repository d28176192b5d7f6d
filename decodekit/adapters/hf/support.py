"""Which ``transformers`` models the ``hf`` adapter can decode exactly, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from decodekit.adapters.agreement import agrees
from decodekit.adapters.hf.longrope import LongRope
from decodekit.adapters.model_code import foreign_attention
from decodekit.adapters.model_facts import input_device_of, is_in_training
from decodekit.adapters.plain_forward import declares
from decodekit.errors import DecodekitError, ModelSupportError, shortened
from decodekit.interfaces.adapter import ModelAdapter

__all__ = ["NO_INTERFACE", "check_agreement", "check_support", "check_windows", "refuse"]

NO_INTERFACE = "its attention cannot be replaced from outside (transformers' attention interface)"
"""Why a model has to run its own kernel."""

_GIVEN = ("position_ids", "attention_mask")
"""What a forward that does not name it may ignore."""

_LAYER_KINDS = {"full_attention", "sliding_attention"}

# Their frequencies depend on the longest position of a pass, so guessed rows would change them.
_MOVING_ROPE = {"dynamic"}


def check_support(model: PreTrainedModel) -> None:
    """Check that every layer of ``model`` can run a token tree and take rows back.

    Raises:
        ModelSupportError: With the model's class and the one thing that stands in the way.
    """
    reason = _obstacle(model)
    if reason is not None:
        refuse(model, reason)


def check_windows(
    model: PreTrainedModel,
    windows: Iterable[tuple[int | None, int | None]],
    *,
    limit: int | None,
) -> None:
    """Check that layers tell attention of the windows that are in their masks, which we replace.

    Args:
        model: The model.
        windows: Of each mask, and what the layer that got it says; None, 0 or a length.
        limit: Positions that a text may have; None for any number.

    Raises:
        ModelSupportError: They differ.
    """
    for of_mask, told in windows:
        binding = [w if w and (limit is None or w < limit) else None for w in (of_mask, told)]
        if binding[0] != binding[1]:
            said = [f"{w} positions" if w else "no end" for w in binding]
            refuse(
                model,
                f"the window of its masks has {said[0]}, but attention is told of {said[1]}",
            )


def refuse(model: PreTrainedModel, reason: str) -> NoReturn:
    """Say that a model cannot be decoded, and why."""
    raise ModelSupportError(
        f"{type(model).__name__} cannot be decoded by the 'hf' adapter: {reason}", reason=reason
    )


def _obstacle(model: PreTrainedModel) -> str | None:
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if config.get_text_config() is not config:
        return "it is a model of several modalities"
    if not model.can_generate():
        return "it has no language-modelling head"
    if is_in_training(model):
        return "it is in training mode, where dropout changes its output; call model.eval()"
    if input_device_of(model).type == "meta":
        return "its weights are on the meta device, so there are none"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state that cannot be rolled back"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _LAYER_KINDS:
        return f"it has layers of kind {', '.join(sorted(kinds - _LAYER_KINDS))}"
    kinds_of_rope = _rope_types(config)
    if "longrope" in kinds_of_rope and LongRope.of(model) is None:
        return "only some of its layers have a 'longrope' RoPE"
    moving = kinds_of_rope & _MOVING_ROPE
    if moving:
        return f"its {moving.pop()!r} RoPE changes with the longest position of a pass"
    generation: Any = getattr(model, "generation_config", None)
    if getattr(generation, "cache_implementation", None) == "quantized":
        return (
            "its generation config asks for a quantised cache, whose keys and values are not those "
            "of a plain one; set model.generation_config.cache_implementation = None"
        )
    quantised: Any = getattr(config, "quantization_config", None)
    if getattr(quantised, "load_in_8bit", False) and quantised.llm_int8_threshold > 0:
        return (
            "its int8 layers treat the outliers of all rows of a pass together, so guesses would "
            "change them; load it with llm_int8_threshold=0"
        )
    if any(_scales_rows_together(module) for module in model.modules()):
        return (
            "its dynamically quantised layers take one scale for all rows of a pass, so guesses "
            "would change it; quantise the weights only"
        )
    return foreign_attention(model)


def _scales_rows_together(module: torch.nn.Module) -> bool:
    """Return whether a layer is one of torch's ``quantize_dynamic`` with int8 activations."""
    # By name: the package is deprecated, and importing what may be gone one day is an error.
    packed = getattr(module, "_packed_params", None)
    dynamic = type(module).__module__.startswith("torch.ao.nn.quantized.dynamic")
    return dynamic and getattr(packed, "dtype", None) == torch.qint8


def check_agreement(adapter: ModelAdapter, reason: str | None) -> None:
    """Check that a model gives a tree's rows what it gives their paths itself.

    Args:
        adapter: Of the model.
        reason: Why there is doubt, what a refusal says first; None if there is none in particular.

    Raises:
        ModelSupportError: It gives something else, or nothing at all.
    """
    model: PreTrainedModel = adapter.model  # type: ignore[attr-defined]
    if reason == NO_INTERFACE and getattr(model.config, "sliding_window", None) is not None:
        refuse(model, reason)
    try:
        if agrees(adapter, model):
            return
        what = "with a tree's mask it gives other results than without"
    except (ModelSupportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever it does with a mask that it did not make
        if reason is None and isinstance(error, DecodekitError):
            raise
        what = f"with a tree's mask it fails: {shortened(error)}"
    ignored = [name for name in _GIVEN if not declares(model, name)]
    if ignored:
        what += f" (its forward does not name {' and '.join(ignored)})"
    refuse(model, what if reason is None else f"{reason}, and {what}")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the RoPE types of all layer kinds."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters, *(group for group in parameters.values() if isinstance(group, dict))]
    return {str(group["rope_type"]) for group in groups if "rope_type" in group}
