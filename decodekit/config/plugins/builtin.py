"""The components that come with decodekit, registered through the plugin hooks.

Backends and adapters are imported when one of them is built: torch's compiler and transformers take
seconds, and ``import decodekit`` must not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from importlib import import_module
from typing import Any

from decodekit.backends.triton.backend import TritonConfig
from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.rejection import RejectionVerifier
from decodekit.errors import ModelSupportError
from decodekit.hookspecs import hookimpl
from decodekit.interfaces.adapter import ModelAdapter
from decodekit.interfaces.backend import AttentionBackend
from decodekit.interfaces.component import Component
from decodekit.strategies.autoregressive import Autoregressive, AutoregressiveConfig
from decodekit.strategies.draft_model import DraftModel, DraftModelConfig
from decodekit.strategies.jacobi import Jacobi, JacobiConfig
from decodekit.strategies.lookahead.pool import RecentNGramPool, RecentPoolConfig
from decodekit.strategies.lookahead.proposer import Lookahead, LookaheadConfig
from decodekit.strategies.prompt_lookup import PromptLookup, PromptLookupConfig

_EAGER = "decodekit.backends.eager:EagerBackend"
_FLASH = "decodekit.backends.flash:FlashBackend"
_FLEX = "decodekit.backends.flex:FlexBackend"
_HF = "decodekit.adapters.hf:HFAdapter"
_INVARIANT = "decodekit.backends.invariant.backend:InvariantBackend"
_LLAMA = "decodekit.adapters.llama:LlamaAdapter"
_SDPA = "decodekit.backends.sdpa:SDPABackend"
_TRITON = "decodekit.backends.triton.backend:TritonBackend"


@dataclass(kw_only=True)
class FlexConfig:
    """Settings of ``backend=flex``.

    Attributes:
        compile: Compile the kernel; otherwise it runs step by step, with all scores in memory.
    """

    name: str = "flex"
    compile: bool = True


@hookimpl
def decodekit_register_strategies() -> list[Component]:
    """Return the strategies."""
    return [
        Component("autoregressive", AutoregressiveConfig, lambda config, _: Autoregressive(config)),
        Component("draft_model", DraftModelConfig, DraftModel),
        Component("jacobi", JacobiConfig, lambda config, _: Jacobi(config)),
        Component("lookahead", LookaheadConfig, Lookahead),
        Component("prompt_lookup", PromptLookupConfig, lambda config, _: PromptLookup(config)),
    ]


@hookimpl
def decodekit_register_pools() -> list[Component]:
    """Return the one pool."""
    return [
        Component(
            "recent",
            RecentPoolConfig,
            lambda config: RecentNGramPool(per_key=config.per_key, max_keys=config.max_keys),
        )
    ]


@hookimpl
def decodekit_register_backends() -> list[Component]:
    """Return the backends; what a kernel needs is looked for when one is built or first used."""
    return [
        _without_settings("auto", _auto_backend),
        _without_settings("eager", lambda: _imported(_EAGER)()),
        _without_settings("flash", lambda: _imported(_FLASH)()),
        Component("flex", FlexConfig, lambda config: _imported(_FLEX)(compiled=config.compile)),
        _without_settings("invariant", lambda: _imported(_INVARIANT)()),
        _without_settings("sdpa", lambda: _imported(_SDPA)()),
        Component("triton", TritonConfig, lambda config: _imported(_TRITON)(config)),
    ]


@hookimpl
def decodekit_register_adapters() -> list[Component]:
    """Return the adapters for transformers models."""
    return [
        _without_settings("auto", _auto_adapter),
        _without_settings("hf", lambda model, backend: _imported(_HF)(model, backend)),
        _without_settings("llama", lambda model, backend: _imported(_LLAMA)(model, backend)),
    ]


@hookimpl
def decodekit_register_verifiers() -> list[Component]:
    """Return the verifiers."""
    return [
        _without_settings("exact_match", ExactMatchVerifier),
        _without_settings("rejection", RejectionVerifier),
    ]


def _without_settings(name: str, build: Callable[..., Any]) -> Component:
    """Return a component whose settings are its name alone."""
    config = make_dataclass(
        f"{name.title().replace('_', '')}Config",
        [("name", str, name)],
        namespace={"__doc__": f"The component {name!r}: there are no settings."},
        kw_only=True,
    )
    return Component(name, config, lambda _, *parts: build(*parts))


def _imported(target: str) -> Any:
    """Return the class that ``module:class`` names."""
    module, name = target.split(":")
    return getattr(import_module(module), name)


def _auto_backend() -> AttentionBackend:
    """Return the backend that takes a kernel by device and dtype."""
    from decodekit.backends.auto import AutoBackend

    return AutoBackend(
        plain=_imported(_SDPA)(), complete=_imported(_EAGER)(), half=_imported(_INVARIANT)()
    )


def _auto_adapter(model: Any, backend: AttentionBackend) -> ModelAdapter:
    """Return ``llama`` where it fits the model, and else ``hf``."""
    from decodekit.adapters.hf import HFAdapter
    from decodekit.adapters.llama import LlamaAdapter, obstacle

    if obstacle(model) is None:
        with suppress(ModelSupportError):  # found out on trial
            return LlamaAdapter(model, backend)
    return HFAdapter(model, backend)
