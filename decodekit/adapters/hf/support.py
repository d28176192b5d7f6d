"""Which ``transformers`` models the ``hf`` adapter can decode exactly, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from decodekit.adapters.hf.longrope import LongRope
from decodekit.errors import ModelSupportError, shortened
from decodekit.interfaces import ModelAdapter
from decodekit.model_facts import max_positions_of
from decodekit.plan import StepPlan
from decodekit.tree import ROOT, TokenTree

__all__ = ["NO_INTERFACE", "check_agreement", "check_support", "check_windows", "refuse"]

NO_INTERFACE = "its attention cannot be replaced from outside (transformers' attention interface)"
"""Why a model has to run its own kernel."""

_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}  # else 0.1, relative to the largest logit

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


def check_windows(model: PreTrainedModel, windows: Iterable[tuple[int | None, int | None]]) -> None:
    """Check that layers tell attention of the windows that are in their masks, which we replace.

    Args:
        model: The model.
        windows: Of each mask, and what the layer that got it says; None, 0 or a length.

    Raises:
        ModelSupportError: They differ.
    """
    limit = max_positions_of(model)
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
    if model.training:
        return "it is in training mode, where dropout changes its output; call model.eval()"
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
    return None


def _scales_rows_together(module: torch.nn.Module) -> bool:
    """Return whether a layer is one of torch's ``quantize_dynamic`` with int8 activations."""
    # By name: the package is deprecated, and importing what may be gone one day is an error.
    packed = getattr(module, "_packed_params", None)
    dynamic = type(module).__module__.startswith("torch.ao.nn.quantized.dynamic")
    return dynamic and getattr(packed, "dtype", None) == torch.qint8


def check_agreement(adapter: ModelAdapter, reason: str) -> None:
    """Check that a model of which that is not certain gives a tree's rows what their paths get.

    A few tokens are run as a tree and, each path alone, as the model runs them itself.

    Args:
        adapter: Of the model.
        reason: Why it is not certain; what a refusal says first.

    Raises:
        ModelSupportError: It gives something else, or nothing at all.
    """
    model: PreTrainedModel = adapter.model  # type: ignore[attr-defined]
    if reason != NO_INTERFACE or getattr(model.config, "sliding_window", None) is None:
        try:
            if _agrees_on_a_tree(adapter, model):
                return
            reason += ", and with a tree's mask it gives other results than without"
        except Exception as error:  # whatever it does with a mask that it did not make
            reason += f", and with a tree's mask it fails: {shortened(error)}"
    refuse(model, reason)


@torch.inference_mode()
def _agrees_on_a_tree(adapter: ModelAdapter, model: PreTrainedModel) -> bool:
    size = adapter.vocab_size
    prompt = tuple(token % size for token in (5, 3, 8, 2, 7))
    tree = TokenTree(tuple(token % size for token in (1, 9, 4, 6)), (ROOT, ROOT, 0, 1))
    cache = adapter.new_cache(batch=1, capacity=len(prompt) + len(tree))
    adapter.forward([StepPlan(0, prompt[:3])], cache)
    cache.commit([range(3)])
    (rows,) = adapter.forward([StepPlan(3, prompt[3:], tree)], cache)
    device = model.get_input_embeddings().weight.device
    for node in range(ROOT, len(tree)):
        ids = torch.tensor([[*prompt, *tree.path_tokens(node)]], device=device)
        alone = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        apart = (rows[node + 1].float() - alone).abs().max()
        if not apart <= _CLOSE.get(model.dtype, 0.1) * (1 + alone.abs().max()):
            return False
    return True


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the RoPE types of all layer kinds."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters, *(group for group in parameters.values() if isinstance(group, dict))]
    return {str(group["rope_type"]) for group in groups if "rope_type" in group}
