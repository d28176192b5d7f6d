"""Is the code that an adapter replaces still what ``transformers`` ships?

An adapter computes attention, or all of a layer, in place of the model. A function of somebody
else's there would be skipped without a word: registered under a name of ``transformers``' attention
interface, or put in the place of a function of a modelling file. Whether it gives the same results
cannot be known for all texts, so it is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

__all__ = [
    "SWAPPED",
    "files_of",
    "foreign_attention",
    "foreign_function",
    "foreign_part",
    "places_of",
]

SWAPPED = "decodekit"
"""The attention implementation that a model names while a step of the ``hf`` adapter runs."""

_SHIPPED = ("transformers", "torch", "kernels", "accelerate", "decodekit")
"""Packages whose functions and decorators change nothing that is computed."""

_OF_EAGER = ("eager_attention_forward", "repeat_kv")


def foreign_attention(model: Any) -> str | None:
    """Return which part of a model's attention is somebody else's, in one clause; None if none."""
    name = getattr(model.config, "_attn_implementation", None) or "eager"
    if name == SWAPPED:  # a step is under way in another thread
        return None
    for module in files_of(model):
        interface = vars(module).get("ALL_ATTENTION_FUNCTIONS", AttentionInterface())
        function = interface.get(name)
        stranger = foreign_part(function)
        if stranger is not None:
            return f"its attention {name!r} is {_named(stranger)}, which would be skipped"
        functions = [*_OF_EAGER] if name == "eager" and function is None else []
        masks = [each for each, held in vars(module).items() if _makes_masks(each, held)]
        reason = foreign_function(module, [*functions, *masks])
        if reason is not None:
            return reason
    stranger = foreign_part(AttentionMaskInterface().get(name))
    if stranger is not None:
        return f"its mask {name!r} is made by {_named(stranger)}, which would be skipped"
    stranger = foreign_part(torch.nn.functional.scaled_dot_product_attention)
    if stranger is not None:
        return f"torch's scaled_dot_product_attention was replaced by {_named(stranger)}"
    return None


def foreign_function(module: ModuleType, names: list[str] | None = None) -> str | None:
    """Return which function of a modelling file was replaced, in one clause; None if none was.

    Args:
        module: The file.
        names: Those that are looked at; None for all.
    """
    for name in vars(module) if names is None else names:
        function = vars(module).get(name)
        if not isinstance(function, (FunctionType, partial)):
            continue
        stranger = foreign_part(function)
        if stranger is None and not _belongs(name, function, module):
            stranger = function
        if stranger is not None:
            return f"{name} of {module.__name__} was replaced by {_named(stranger)}"
    return None


def foreign_part(function: Any) -> Any:
    """Return what of a function and its decorators is no code of a known package; None if all is.

    ``functools.wraps`` copies a function's name and module, so it is asked where its code stands.
    """
    for part in _parts(function):
        if isinstance(part, FunctionType):
            home = str(part.__globals__.get("__name__", ""))
        else:
            home = type(part).__module__
        if home.partition(".")[0] not in (*_SHIPPED, "builtins"):
            return part
    return None


def places_of(model: Any) -> list[tuple[dict[str, Any], str]]:
    """Return where all this code is held: dictionaries, and names in them."""
    held = [vars(module) for module in files_of(model)]
    functions = [
        (names, name)
        for names in held
        for name, value in names.items()
        if isinstance(value, FunctionType)
    ]
    interfaces = [
        (interface._global_mapping, name)
        for interface in (AttentionInterface, AttentionMaskInterface)
        for name in {*interface._global_mapping, "eager"}  # which is not there unless registered
    ]
    return [
        *functions,
        *interfaces,
        (vars(torch.nn.functional), "scaled_dot_product_attention"),
    ]


def files_of(model: Any) -> list[ModuleType]:
    """Return the modelling files of ``transformers`` that the classes of a model stand in."""
    names = {type(module).__module__ for module in model.modules()}
    return [
        sys.modules[name]
        for name in sorted(names)
        if name.startswith("transformers.models.") and name in sys.modules
    ]


def _parts(function: Any) -> Iterator[Any]:
    """Yield a function, and what it wraps, down to the last."""
    while function is not None:
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        else:
            yield function
            function = getattr(function, "__wrapped__", None)


def _belongs(name: str, function: Any, module: ModuleType) -> bool:
    """Return whether a function stands under its own name, and in no other model's place."""
    *_, innermost = _parts(function)
    home = str(getattr(innermost, "__globals__", {}).get("__name__", ""))
    is_of_a_model = home.startswith("transformers.models.")
    return getattr(innermost, "__name__", name) == name and (
        not is_of_a_model or home == module.__name__
    )


def _makes_masks(name: str, held: Any) -> bool:
    return name.startswith("create_") and "mask" in name and callable(held)


def _named(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return f"{home}.{name}"
