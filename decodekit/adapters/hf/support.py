"""Which ``transformers`` models the ``hf`` adapter can decode exactly, and why not the others."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from decodekit.errors import ModelSupportError

__all__ = ["check_support"]

_LAYER_KINDS = {"full_attention", "sliding_attention"}

# Their frequencies depend on the longest position of a pass, so guessed rows would change them.
_MOVING_ROPE = {"dynamic", "longrope"}


def check_support(model: PreTrainedModel) -> None:
    """Check that every layer of ``model`` can run a token tree and take rows back.

    Raises:
        ModelSupportError: With the model's class and the one thing that stands in the way.
    """
    reason = _obstacle(model)
    if reason is not None:
        raise ModelSupportError(
            f"{type(model).__name__} cannot be decoded by the 'hf' adapter: {reason}",
            reason=reason,
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if config.get_text_config() is not config:
        return "it is a model of several modalities"
    if not model.can_generate():
        return "it has no language-modelling head"
    if model.training:
        return "it is in training mode, where dropout changes its output; call model.eval()"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state that cannot be rolled back"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _LAYER_KINDS:
        return f"it has layers of kind {', '.join(sorted(kinds - _LAYER_KINDS))}"
    moving = _rope_types(config) & _MOVING_ROPE
    if moving:
        return f"its {moving.pop()!r} RoPE changes with the longest position of a pass"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced from outside (transformers' attention interface)"
    return None


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the RoPE types of all layer kinds."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters, *(group for group in parameters.values() if isinstance(group, dict))]
    return {str(group["rope_type"]) for group in groups if "rope_type" in group}
