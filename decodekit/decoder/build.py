"""From settings to working parts: combinations that cannot work fail here, never in mid-step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from decodekit.adapters.execution.modes import check_execution
from decodekit.adapters.execution.packed import can_pack_model, pack_linears
from decodekit.config.plugins.installed import registry
from decodekit.config.schema import DecoderConfig
from decodekit.engine.autocast import outside_autocast
from decodekit.errors import (
    CheckpointError,
    ConfigError,
    DecodekitError,
    PluginError,
    in_one_line,
    shortened,
)
from decodekit.interfaces.adapter import HasExecution, HasPositionLimit, ModelAdapter
from decodekit.interfaces.backend import AttentionBackend
from decodekit.interfaces.component import Component, Kind, ModelConfig
from decodekit.interfaces.strategy import NGramPool, Strategy
from decodekit.interfaces.verifier import Verifier
from decodekit.models.checkpoint import resolve_checkpoint
from decodekit.models.loading import check_placement, load_model

__all__ = [
    "build_adapter",
    "build_backend",
    "build_strategy",
    "build_verifier",
    "load",
    "prepare_execution",
]


def load(config: DecoderConfig) -> tuple[Any, Any]:
    """Find, fetch if need be, and load the model and tokenizer that ``config`` names.

    They are those of ``transformers``, unless the adapter loads its models itself.

    Raises:
        CheckpointError: The checkpoint cannot be found, fetched or read.
        ConfigError: ``dtype`` or ``device`` is unknown or not available, the model needs another
            adapter, or consent to run code of its own.
        PluginError: The adapter is a plugin's, and what loads its models is broken.
    """
    check_execution(config.execution)
    check_placement(dtype=config.dtype, device=config.device)
    model: ModelConfig = config.model
    component, settings = _configured("adapter", config.adapter)
    if model.adapter not in (None, component.name):
        raise ConfigError(
            f"model {model.name!r} needs adapter={model.adapter}, not {component.name}",
            key="adapter",
            value=component.name,
        )
    if component.load is not None:
        loaded = _call(
            component, component.load, settings, model, dtype=config.dtype, device=config.device
        )
        if not isinstance(loaded, tuple) or len(loaded) != 2:
            raise PluginError(
                f"plugin {component.plugin!r}: load of the adapter {component.name!r} must return "
                f"a model and a tokenizer, not {shortened(loaded)}",
                plugins=(component.plugin,),
            )
        return loaded
    found = resolve_checkpoint(
        name=model.name,
        path=model.path,
        repo=model.repo,
        revision=model.revision,
        package=model.package,
        trust_remote_code=model.trust_remote_code,
    )
    return load_model(
        found,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=model.trust_remote_code,
    )


def prepare_execution(model: Any, mode: str, adapter: ModelAdapter | None = None) -> str:
    """Prepare a loaded model for a way of execution and return the one that was picked.

    Args:
        model: Changed in place by ``packed``, and by ``compiled`` where it can be packed. One that
            is no ``torch`` module runs as it is.
        mode: One of ``EXECUTIONS``. ``auto`` is the first of ``native``, ``packed`` and ``eager``
            that works.
        adapter: What runs the model; ``native``, ``compiled`` and ``graphs`` are its business.

    Raises:
        ConfigError: The mode is unknown, or cannot work here.
    """
    check_execution(mode)
    can_pack = can_pack_model(model)
    if mode == "auto":
        native = isinstance(adapter, HasExecution) and adapter.native_obstacle() is None
        mode = "native" if native else "packed" if can_pack else "eager"
    if mode in ("native", "compiled", "graphs") and not isinstance(adapter, HasExecution):
        name = getattr(adapter, "name", type(adapter).__name__)
        reason = _llama_obstacle(model)
        why = f" (the LLaMA family), not {name}"
        if reason is not None:
            why = f", which cannot run this model: {reason}"
        raise ConfigError(
            f"execution={mode} needs adapter=llama{why}; use execution=auto",
            key="execution",
            value=mode,
        )
    if mode == "packed" and not isinstance(model, torch.nn.Module):
        raise ConfigError(
            "execution=packed needs a torch module; use execution=eager", key="execution"
        )
    if mode == "packed" or (mode == "compiled" and can_pack):
        pack_linears(model)
    if isinstance(adapter, HasExecution):
        with outside_autocast():
            adapter.use_execution(mode if mode in ("native", "compiled", "graphs") else "eager")
    return mode


def _llama_obstacle(model: Any) -> str | None:
    """Return why ``adapter=llama`` cannot run a model; None if it can."""
    from decodekit.adapters.llama import obstacle  # transformers, only where it is needed

    return obstacle(model) if isinstance(model, torch.nn.Module) else "it is no torch module"


def build_strategy(settings: Any) -> Strategy:
    """Return the strategy of a name, a mapping with ``name`` or a settings dataclass.

    A strategy that is built already is returned as it is.

    Raises:
        ConfigError: The name or a setting is unknown or out of its range.
    """
    if isinstance(settings, Strategy):
        return settings
    component, config = _configured("strategy", settings)
    strategy: Strategy = _built(component, Strategy, config, _Parts())
    return strategy


def build_adapter(
    model: Any, *, adapter: Any = "auto", backend: Any = "auto", max_positions: int | None = None
) -> ModelAdapter:
    """Return an adapter over a loaded model.

    Args:
        model: What the adapter runs; for ``hf`` a ``transformers`` model in evaluation mode.
        adapter: A name or a settings dataclass.
        backend: A name or a settings dataclass.
        max_positions: The longest text; None for what the model's configuration says.

    Raises:
        ConfigError: The model cannot run texts of ``max_positions``.
        ModelSupportError: The adapter cannot decode this model exactly.
        BackendError: The backend is not available here.
    """
    adapter_of, adapter_config = _configured("adapter", adapter)
    kernel = build_backend(backend)
    with outside_autocast():
        built: ModelAdapter = _built(adapter_of, ModelAdapter, adapter_config, model, kernel)
    if max_positions is not None:
        if not isinstance(built, HasPositionLimit):
            raise ConfigError(
                f"the adapter {adapter_of.name!r} takes no max_positions; leave it out",
                key="model.max_positions",
                value=max_positions,
            )
        built.limit_positions(max_positions)
    return built


def build_backend(settings: Any) -> AttentionBackend:
    """Return the attention backend of a name or a settings dataclass.

    Raises:
        BackendError: It is not available here.
    """
    component, config = _configured("backend", settings)
    kernel: AttentionBackend = _built(component, AttentionBackend, config)
    return kernel


def build_verifier(settings: Any) -> Verifier:
    """Return the verifier of a name or a settings dataclass."""
    component, config = _configured("verifier", settings)
    verifier: Verifier = _built(component, Verifier, config)
    return verifier


class _Parts:
    """The ``Parts`` of this process: components of the registry, models like the decoder's."""

    def new_pool(self, name: str, *, per_key: int, max_keys: int) -> NGramPool:
        """Return a fresh pool by name; see ``Parts.new_pool``."""
        component = registry().get("pool", name)
        config = component.configure("pool", {"per_key": per_key, "max_keys": max_keys})
        pool: NGramPool = _built(component, NGramPool, config)
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
        from decodekit.config.compose import compose_mapping  # Hydra, only where it is needed

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
        except ConfigError as error:
            if error.key not in ("model.trust_remote_code", "model.revision"):
                raise
            raise ConfigError(
                f"strategy.model: {error} (the draft's own settings, from Python: "
                '"model": {"path": PLACE, "trust_remote_code": True})',
                key="strategy.model",
                value=model,
            ) from error
        adapter = build_adapter(
            loaded,
            adapter=config.adapter,
            backend=config.backend,
            max_positions=config.model.max_positions,
        )
        prepare_execution(loaded, config.execution, adapter)
        return adapter, tokenizer


def _call(component: Component, function: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Call what a component brings; an error that is not decodekit's own names the plugin."""
    try:
        return function(*given, **more)
    except (DecodekitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if component.plugin == "decodekit":
            raise
        raise PluginError(
            f"plugin {component.plugin!r} failed to make {component.name!r}: "
            f"{type(error).__name__}: {in_one_line(error)}",
            plugins=(component.plugin,),
        ) from error


def _built(component: Component, interface: type, *given: Any) -> Any:
    """Build a component and check that it is what its kind asks for."""
    built = _call(component, component.build, *given)
    if not isinstance(built, interface):
        raise PluginError(
            f"plugin {component.plugin!r}: {component.name!r} must be a {interface.__name__}; "
            f"{type(built).__name__} lacks some of its methods (decodekit.interfaces)",
            plugins=(component.plugin,),
        )
    return built


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
        return component, component.configure(kind, values)
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
