"""Composing settings with Hydra: YAML files, plugins' schemas and overrides become a ``RunConfig``.

Only this module, ``schemas`` and ``mistakes`` import Hydra and OmegaConf; beyond them there are
dataclasses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decodekit.config.hydra_session import hydra_session
from decodekit.config.messages import check_key, config_error, first_line, setting_name
from decodekit.config.plugins.installed import registry
from decodekit.config.plugins.registry import GROUPS
from decodekit.config.schema import (
    BenchConfig,
    ConstraintConfig,
    ProfileConfig,
    RunConfig,
    VerifyConfig,
)
from decodekit.config.verbatim import LITERAL, is_path, literal_of, with_literals
from decodekit.errors import ConfigError, nearest
from decodekit.interfaces.component import ModelConfig
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["compose_config", "compose_mapping", "group_options", "to_yaml"]

_SECTIONS = {
    "bench": BenchConfig,
    "profile": ProfileConfig,
    "verify": VerifyConfig,
    "constraint": ConstraintConfig,
}


def compose_config(overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings that overrides in Hydra's grammar ask for.

    The texts of prompts, stop strings and paths are taken as they are, so that they may hold any
    character; see ``literals``.

    Args:
        overrides: For example ``["strategy=lookahead", "strategy.window_size=7"]``.

    Raises:
        ConfigError: An override is malformed, or names an option, a key or a value that does not
            exist; the message has the nearest one.
    """
    literal: dict[str, Any] = {}
    rest: list[str] = []
    given = [override.partition("=")[0] for override in overrides]
    for override in overrides:
        key, sign, value = override.partition("=")
        own = setting_name(key, given) if sign else key
        key, override = own, f"{own}{override[len(key) :]}"
        if not sign and key.isprintable() and not key.startswith(("+", "~")):
            raise ConfigError(f'cannot read the override: {key!r}; a prompt is prompt="{key}"')
        text = literal_of(key, value) if sign else None
        if text is not None:
            literal[key] = text
        elif key == "model" and is_path(value):
            literal["model.path"] = value
            rest.append("model=local")
        else:
            # The last one counts, however it was given.
            literal.pop("model.path" if key == "model" else key, None)
            rest.append(override)
    return with_literals(_to_dataclass(_compose(rest)), literal)


def compose_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """Return the settings that a nested mapping asks for.

    Args:
        settings: Names for whole groups (``{"strategy": "jacobi"}``), mappings for settings inside
            them (``{"strategy": {"name": "jacobi", "window_size": 4}}``), settings dataclasses, or
            a ``DictConfig`` that was composed elsewhere.

    Raises:
        ConfigError: As for ``compose_config``.
    """
    plain = _plain(settings) if isinstance(settings, DictConfig) else dict(settings)
    plain = {setting_name(key, plain): value for key, value in plain.items()}
    literal = {key: plain.pop(key) for key in LITERAL if key in plain}
    choices = []
    for group in GROUPS:
        name = _take_choice(group, plain, literal)
        if name is not None:
            choices.append(f"{group}={name}")
    config = _compose(choices)
    for key in plain:
        if "." in key:
            raise ConfigError(f"{key!r} must be written as a mapping in a mapping", key=key)
    for dotted in _leaves(plain):
        check_key(config, dotted)
    try:
        merged = OmegaConf.merge(config, plain)
    except OmegaConfBaseException as error:
        raise config_error(error) from error
    return with_literals(_to_dataclass(merged), literal)


def _take_choice(group: str, plain: dict[str, Any], literal: dict[str, Any]) -> str | None:
    """Return the name that a mapping chooses for ``group``; None if it leaves the default.

    Args:
        group: The group.
        plain: The mapping; afterwards it holds for the group only the settings inside it.
        literal: Takes the path of a model that is given by its path alone, and a draft that is
            no name.
    """
    value = plain.get(group)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        plain[group] = inner = dict(value)
        if group == "strategy" and not isinstance(inner.get("model"), str | None):
            literal["strategy.model"] = inner.pop("model")  # settings of a draft, or a loaded one
        if group == "sampling":
            # It has no name of its own; the name only says which file is meant.
            name: str | None = inner.pop("name", None)
            return name
        if group == "model" and any(inner.get(at) for at in ("path", "repo", "package")):
            return "local"  # a model that says itself where it is may have any name
        return inner.get("name")
    if group not in plain:
        return None
    del plain[group]
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"{group} must be a name or settings, not a {type(value).__name__}; for one that "
            "is built already use Decoder.from_model",
            key=group,
        )
    if group == "model" and value is not None and is_path(value):
        literal["model.path"] = value
        return "local"
    return str(value)


def group_options(group: str) -> list[str]:
    """Return the names that can be chosen for ``group``, plugins' included, sorted."""
    with hydra_session():
        return _options(group)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes as text what YAML has no word for: a path, an enumeration of a plugin's settings."""


def _as_text(dumper: Any, value: object) -> Any:
    return dumper.represent_str(value.name if isinstance(value, Enum) else str(value))


_Dumper.add_multi_representer(object, _as_text)


def to_yaml(config: RunConfig) -> str:
    """Return the settings as YAML."""
    text: str = yaml.dump(
        dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    return text


def _compose(overrides: Sequence[str]) -> DictConfig:
    """Compose after checking names and keys, so that a mistake gets one line with the fix."""
    with hydra_session():
        try:
            parsed = OverridesParser.create().parse_overrides(list(overrides))
        except HydraException as error:
            raise ConfigError(
                f"cannot read the override: {first_line(error)} (write key=value, and quote a "
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
                    f"{key} has several values; a list is {key}=[a,b], and a text that holds "
                    f"commas is quoted: '{key}=\"a,b\"'",
                    key=key,
                )
            if key in GROUPS:
                _check_choice(key, str(override.value()))
                choices.append(str(override.input_line))
            else:
                values[key] = override.value()
        try:
            config = compose("config", overrides=choices)
            needed = config.model.adapter  # a model that only one adapter runs brings it along
            if needed is not None and not any(one.startswith("adapter=") for one in choices):
                _check_choice("adapter", needed)
                config = compose("config", overrides=[*choices, f"adapter={needed}"])
            OmegaConf.set_struct(config.sampling.logit_bias, False)  # any token may be a key
            OmegaConf.set_struct(config.chat_template_kwargs, False)  # and any variable
            for key, value in values.items():
                check_key(config, key)
                group, _, last = key.rpartition(".")
                if last == "name" and GROUPS.get(group) is not None:
                    raise ConfigError(f"choose a {group} with {group}={value}", key=key)
                if group == "sampling.logit_bias" and last.isdecimal():
                    config.sampling.logit_bias[int(last)] = value
                    continue
                OmegaConf.update(config, key, value)
        except (HydraException, OmegaConfBaseException, OverflowError) as error:
            raise config_error(error) from error
    return config


def _options(group: str) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(group, results_filter=ObjectType.CONFIG))


def _check_choice(group: str, name: str) -> None:
    options = _options(group)
    if name not in options and group == "model" and Path(name).is_dir():
        raise ConfigError(
            f"unknown model {name!r}: for the directory write model=./{name}", key=group
        )
    if name not in options:
        raise ConfigError(f"unknown {group} {name!r}: {nearest(name, options)}", key=group)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a nested mapping."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(  # type: ignore[return-value]
            config, resolve=True, throw_on_missing=True
        )
    except OmegaConfBaseException as error:
        raise config_error(error) from error


def _to_dataclass(config: Any) -> RunConfig:
    """Build the dataclasses, which check their values, from a composed config."""
    settings = _plain(config)
    components = registry()
    for group, kind in GROUPS.items():
        values = settings[group]
        if kind is not None:
            settings[group] = components.get(kind, str(values.get("name"))).configure(kind, values)
        else:
            settings[group] = (ModelConfig if group == "model" else SamplingParams)(**values)
    for name, kind_of in _SECTIONS.items():
        settings[name] = kind_of(**settings[name])
    return RunConfig(**settings)
