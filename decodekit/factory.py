"""From settings to working parts: combinations that cannot work fail here, never in mid-step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from decodekit.config import DecoderConfig, ModelConfig
from decodekit.errors import CheckpointError, ConfigError, nearest, shortened
from decodekit.execution.packed import can_pack, pack_linears
from decodekit.interfaces import (
    AttentionBackend,
    ModelAdapter,
    NGramPool,
    Strategy,
    Verifier,
)
from decodekit.models.checkpoint import resolve_checkpoint
from decodekit.models.loading import check_placement, load_model
from decodekit.plugins import registry
from decodekit.registry import Component, Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "EXECUTIONS",
    "build_adapter",
    "build_backend",
    "build_strategy",
    "build_verifier",
    "check_execution",
    "load",
    "prepare_execution",
]

EXECUTIONS = ("auto", "eager", "packed")


def load(config: DecoderConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Find, fetch if need be, and load the model and tokenizer that ``config`` names.

    Raises:
        CheckpointError: The checkpoint cannot be found, fetched or read.
        ConfigError: ``dtype`` or ``device`` is unknown or not available.
    """
    check_execution(config.execution)
    check_placement(dtype=config.dtype, device=config.device)
    model: ModelConfig = config.model
    directory = resolve_checkpoint(
        name=model.name,
        path=model.path,
        repo=model.repo,
        revision=model.revision,
        package=model.package,
    )
    return load_model(directory, dtype=config.dtype, device=config.device)


def check_execution(mode: str) -> None:
    """Check the name of a way of execution.

    Raises:
        ConfigError: There is none of that name.
    """
    if mode not in EXECUTIONS:
        raise ConfigError(
            f"unknown execution {mode!r}: {nearest(str(mode), EXECUTIONS)}",
            key="execution",
            value=mode,
        )


def prepare_execution(model: PreTrainedModel, mode: str) -> str:
    """Prepare a loaded model for a way of execution and return the one that was picked.

    Args:
        model: Changed in place by ``packed``.
        mode: ``eager``, ``packed`` or ``auto``.

    Raises:
        ConfigError: The mode is unknown, or cannot work here.
    """
    check_execution(mode)
    if mode == "auto":
        mode = "packed" if model.device.type == "cpu" and can_pack(model.dtype) else "eager"
    if mode == "packed":
        pack_linears(model)
    return mode


def build_strategy(settings: Any) -> Strategy:
    """Return the strategy of a name, a mapping with ``name`` or a settings dataclass.

    A strategy that is built already is returned as it is.

    Raises:
        ConfigError: The name or a setting is unknown or out of its range.
    """
    if isinstance(settings, Strategy):
        return settings
    component, config = _configured("strategy", settings)
    strategy: Strategy = component.build(config, _Parts())
    return strategy


def build_adapter(
    model: PreTrainedModel, *, adapter: Any = "auto", backend: Any = "sdpa"
) -> ModelAdapter:
    """Return an adapter over a loaded model.

    Args:
        model: In evaluation mode.
        adapter: A name or a settings dataclass.
        backend: A name or a settings dataclass.

    Raises:
        ModelSupportError: The adapter cannot decode this model exactly.
        BackendError: The backend is not available here.
    """
    adapter_of, adapter_config = _configured("adapter", adapter)
    built: ModelAdapter = adapter_of.build(adapter_config, model, build_backend(backend))
    return built


def build_backend(settings: Any) -> AttentionBackend:
    """Return the attention backend of a name or a settings dataclass.

    Raises:
        BackendError: It is not available here.
    """
    component, config = _configured("backend", settings)
    kernel: AttentionBackend = component.build(config)
    return kernel


def build_verifier(settings: Any) -> Verifier:
    """Return the verifier of a name or a settings dataclass."""
    component, config = _configured("verifier", settings)
    verifier: Verifier = component.build(config)
    return verifier


class _Parts:
    """The ``Parts`` of this process: components of the registry, models like the decoder's."""

    def new_pool(self, name: str, *, per_key: int, max_keys: int) -> NGramPool:
        """Return a fresh pool by name; see ``Parts.new_pool``."""
        component = registry().get("pool", name)
        pool: NGramPool = component.build(component.config(per_key=per_key, max_keys=max_keys))
        return pool

    def load_model(
        self, model: Any, *, backend: str, like: ModelAdapter
    ) -> tuple[ModelAdapter, Any]:
        """Return a further model and its tokenizer; see ``Parts.load_model``."""
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        if not isinstance(model, (str, Mapping)):
            if not hasattr(model, "config"):
                raise ConfigError(
                    f"the draft must be a name, a directory or a loaded transformers model, not "
                    f"{shortened(model)}",
                    key="strategy.model",
                )
            return build_adapter(model, backend=backend), None
        from decodekit.compose import compose_mapping  # Hydra, only where it is needed

        settings: dict[str, Any] = {"model": model, "backend": backend}
        beside = getattr(like, "model", None)
        if beside is not None and hasattr(beside, "dtype") and hasattr(beside, "device"):
            settings["dtype"] = str(beside.dtype).removeprefix("torch.")
            settings["device"] = str(beside.device)
        config = compose_mapping(settings)
        try:
            loaded, tokenizer = load(config)
        except CheckpointError as error:
            error.args = (f"strategy.model: {error}",)
            raise
        adapter = build_adapter(loaded, adapter=config.adapter, backend=config.backend)
        prepare_execution(loaded, config.execution)
        return adapter, tokenizer


def _configured(kind: Kind, settings: Any) -> tuple[Component, Any]:
    """Return the component that ``settings`` name and its settings dataclass.

    Args:
        kind: What is looked for.
        settings: A name, a mapping with ``name``, or a settings dataclass.
    """
    if isinstance(settings, str):
        settings = {"name": settings}
    if isinstance(settings, Mapping):
        values = dict(settings)
        component = registry().get(kind, str(values.get("name")))
        known = [field.name for field in fields(component.config)]
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"unknown key {key!r} in {kind!r}: {nearest(key, known)}", key=f"{kind}.{key}"
                )
        return component, component.config(**values)
    name = getattr(settings, "name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"{kind} must be a name, a mapping with a name or settings, not {shortened(settings)}",
            key=kind,
            value=settings,
        )
    component = registry().get(kind, name)
    if not isinstance(settings, component.config):
        raise ConfigError(
            f"{kind} {name!r} takes a {component.config.__name__}, not a {type(settings).__name__}",
            key=kind,
        )
    return component, settings
