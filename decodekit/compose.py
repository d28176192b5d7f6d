"""Composing settings with Hydra: YAML files, plugins' schemas and overrides become a ``RunConfig``.

The only module that imports Hydra and OmegaConf; beyond it there are dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decodekit.config import BenchConfig, ModelConfig, RunConfig
from decodekit.errors import ConfigError, nearest
from decodekit.plugins import registry
from decodekit.registry import Kind
from decodekit.sampling import SamplingParams

__all__ = ["compose_config", "compose_mapping", "group_options", "to_yaml"]

_GROUPS: dict[str, Kind | None] = {
    "strategy": "strategy",
    "backend": "backend",
    "adapter": "adapter",
    "verifier": "verifier",
    "model": None,
    "sampling": None,
}
"""The groups that a name can be chosen for, with the kind of component that is behind it."""

_LITERAL = ("prompt", "prompt_file", "stop")
"""Keys whose text is taken as it is: a prompt must not be read as Hydra's grammar."""


def compose_config(overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings that overrides in Hydra's grammar ask for.

    The text after ``prompt=``, ``prompt_file=`` and ``stop=`` is taken as it is, so that it may
    hold any character; ``stop=[a,b]`` is a list in Hydra's grammar.

    Args:
        overrides: For example ``["strategy=lookahead", "strategy.window_size=7"]``.

    Raises:
        ConfigError: An override is malformed, or names an option, a key or a value that does not
            exist; the message has the nearest one.
    """
    literal: dict[str, Any] = {}
    rest: list[str] = []
    for override in overrides:
        key, sign, value = override.partition("=")
        if sign and key in _LITERAL and not (key == "stop" and value.startswith("[")):
            literal[key] = [value] if key == "stop" else value
        else:
            rest.append(override)
    return dataclasses.replace(_to_dataclass(_compose(rest)), **literal)


def compose_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """Return the settings that a nested mapping asks for.

    Args:
        settings: Names for whole groups (``{"strategy": "jacobi"}``), mappings for settings inside
            them (``{"strategy": {"name": "jacobi", "window_size": 4}}``), or a ``DictConfig`` that
            was composed elsewhere.

    Raises:
        ConfigError: As for ``compose_config``.
    """
    plain = _plain(settings) if isinstance(settings, DictConfig) else dict(settings)
    choices: list[str] = []
    for key in _GROUPS:
        value = plain.get(key)
        if isinstance(value, Mapping):
            plain[key] = value = dict(value)
            # A model that says itself where it is may have any name.
            local = key == "model" and any(value.get(at) for at in ("path", "repo", "package"))
            value = None if local else value.get("name")
            if local:
                choices.append("model=local")
        elif value is not None:
            del plain[key]
        if value is not None:
            choices.append(f"{key}={value}")
    literal = {key: plain.pop(key) for key in _LITERAL if key in plain}
    config = _compose(choices)
    for dotted in _leaves(plain):
        _check_key(config, dotted)
    try:
        return dataclasses.replace(_to_dataclass(OmegaConf.merge(config, plain)), **literal)
    except OmegaConfBaseException as error:
        raise ConfigError(_reason(error)) from error


def group_options(group: str) -> list[str]:
    """Return the names that can be chosen for ``group``, plugins' included, sorted."""
    with _hydra():
        return _options(group)


def to_yaml(config: RunConfig) -> str:
    """Return the settings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def _compose(overrides: Sequence[str]) -> DictConfig:
    """Compose after checking names and keys, so that a mistake gets one line with the fix."""
    with _hydra():
        try:
            parsed = OverridesParser.create().parse_overrides(
                [part for override in overrides for part in _expand(override)]
            )
        except HydraException as error:
            raise ConfigError(
                f"cannot read the override: {_reason(error)} (write key=value, and quote a "
                "value with special characters: 'key=\"a, b\"')"
            ) from error
        choices: list[str] = []
        values: dict[str, Any] = {}
        for override in parsed:
            key = override.key_or_group
            if override.type is not OverrideType.CHANGE:
                raise ConfigError(
                    f"keys cannot be added or removed: {override.input_line}", key=key
                )
            if override.is_sweep_override():
                raise ConfigError(
                    f"{key} has several values; quote a value that holds commas: '{key}=\"a,b\"'",
                    key=key,
                )
            if key in _GROUPS:
                _check_choice(key, str(override.value()))
                choices.append(str(override.input_line))
            else:
                values[key] = override.value()
        try:
            config = compose("config", overrides=choices)
            for key, value in values.items():
                _check_key(config, key)
                OmegaConf.update(config, key, value)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_reason(error)) from error
    return config


def _hydra() -> initialize_config_module:
    """Return the context in which our files and the registered schemas can be composed."""
    store = ConfigStore.instance()
    store.store("run", _schema(), group="schema")
    store.store("model", ModelConfig, group="schema")
    store.store("sampling", SamplingParams, group="schema")
    components = registry()
    for group, kind in _GROUPS.items():
        if kind is None:
            continue
        for name in components.names(kind):
            component = components.get(kind, name)
            store.store(name, component.config, group=f"schema/{group}")
            if component.plugin != "decodekit":  # built-ins have files in conf/
                store.store(name, component.config, group=group)
    return initialize_config_module("decodekit.conf", version_base="1.3")


def _schema() -> type:
    """Return ``RunConfig`` with each group left open: its files bring their own schemas."""
    return dataclasses.make_dataclass(
        "RunSchema",
        [(group, Any, dataclasses.field(default=MISSING)) for group in _GROUPS],
        bases=(RunConfig,),
        kw_only=True,
    )


def _options(group: str) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(group, results_filter=ObjectType.CONFIG))


def _check_choice(group: str, name: str) -> None:
    options = _options(group)
    if name not in options:
        raise ConfigError(f"unknown {group} {name!r}: {nearest(name, options)}", key=group)


def _expand(override: str) -> list[str]:
    """Turn ``model=/a/directory`` and ``model=owner/name`` into the choice of ``local``'s path."""
    key, _, value = override.partition("=")
    if key != "model" or "/" not in value:
        return [override]
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return ["model=local", f"model.path='{quoted}'"]


def _check_key(config: DictConfig, dotted: str) -> None:
    """Raise unless ``dotted`` is a key of ``config``, naming the nearest key beside it."""
    node: Any = config
    for depth, part in enumerate(parts := dotted.split(".")):
        where = ".".join(parts[:depth])
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{where!r} has no settings inside it", key=dotted)
        if part not in node:
            inside = f" in {where!r}" if where else ""
            raise ConfigError(
                f"unknown key {part!r}{inside}: {nearest(part, map(str, node))}", key=dotted
            )
        node = node._get_node(part)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a nested mapping."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _plain(config: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def _to_dataclass(config: Any) -> RunConfig:
    """Build the dataclasses, which check their values, from a composed config."""
    settings = _plain(config)
    components = registry()
    for group, kind in _GROUPS.items():
        values = settings[group]
        if kind is not None:
            schema = components.get(kind, values["name"]).config
        else:
            schema = ModelConfig if group == "model" else SamplingParams
        settings[group] = schema(**values)
    settings["bench"] = BenchConfig(**settings["bench"])
    return RunConfig(**settings)


def _reason(error: Exception) -> str:
    """Return a Hydra or OmegaConf error as one line, with the key it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    keys = [line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")]
    return f"{keys[0]}: {lines[0]}" if keys else " ".join(lines[:1])
