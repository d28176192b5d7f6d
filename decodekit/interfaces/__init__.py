"""All that a plugin author has to read: the values of a step, and what each part has to do.

A decoding step is: a ``Proposer`` guesses a token tree, a ``ModelAdapter`` runs it in one forward
pass (with an ``AttentionBackend`` under it), a ``Verifier`` walks it, and the proposer observes
what came of it. Anything with the right methods fits; nothing has to be subclassed.

Every name can be imported from here. A module is loaded when one of its names is first used, so
that token trees and settings need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decodekit.interfaces.adapter import (
        Compilation,
        HasArgmax,
        HasExecution,
        HasHorizon,
        HasPositionLimit,
        HasRepeat,
        KVCache,
        ModelAdapter,
    )
    from decodekit.interfaces.backend import AttentionBackend, MaskBuilder
    from decodekit.interfaces.component import Component, Kind, ModelConfig
    from decodekit.interfaces.events import FinishReason, StepEvent
    from decodekit.interfaces.logits import Constraint, LogitsProcessor
    from decodekit.interfaces.mask import TreeMask
    from decodekit.interfaces.plan import StepPlan
    from decodekit.interfaces.sampling_params import SamplingParams
    from decodekit.interfaces.strategy import (
        Budget,
        NeedsTarget,
        NGramPool,
        Parts,
        Proposal,
        Proposer,
        StepOutcome,
        Strategy,
        TargetTokens,
    )
    from decodekit.interfaces.tree import EMPTY_TREE, ROOT, TokenTree
    from decodekit.interfaces.verifier import Accepted, Verifier

_NAMES = {
    "adapter": (
        "Compilation",
        "HasArgmax",
        "HasExecution",
        "HasHorizon",
        "HasPositionLimit",
        "HasRepeat",
        "KVCache",
        "ModelAdapter",
    ),
    "backend": ("AttentionBackend", "MaskBuilder"),
    "component": ("Component", "Kind", "ModelConfig"),
    "events": ("FinishReason", "StepEvent"),
    "logits": ("Constraint", "LogitsProcessor"),
    "mask": ("TreeMask",),
    "plan": ("StepPlan",),
    "sampling_params": ("SamplingParams",),
    "strategy": (
        "Budget",
        "NGramPool",
        "NeedsTarget",
        "Parts",
        "Proposal",
        "Proposer",
        "StepOutcome",
        "Strategy",
        "TargetTokens",
    ),
    "tree": ("EMPTY_TREE", "ROOT", "TokenTree"),
    "verifier": ("Accepted", "Verifier"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "EMPTY_TREE",
    "ROOT",
    "Accepted",
    "AttentionBackend",
    "Budget",
    "Compilation",
    "Component",
    "Constraint",
    "FinishReason",
    "HasArgmax",
    "HasExecution",
    "HasHorizon",
    "HasPositionLimit",
    "HasRepeat",
    "KVCache",
    "Kind",
    "LogitsProcessor",
    "MaskBuilder",
    "ModelAdapter",
    "ModelConfig",
    "NGramPool",
    "NeedsTarget",
    "Parts",
    "Proposal",
    "Proposer",
    "SamplingParams",
    "StepEvent",
    "StepOutcome",
    "StepPlan",
    "Strategy",
    "TargetTokens",
    "TokenTree",
    "TreeMask",
    "Verifier",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
