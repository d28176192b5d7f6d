"""A mistake in composed settings as one line that names the key and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from decodekit.config.option_names import own_name
from decodekit.config.plugins.installed import settings_files
from decodekit.errors import ConfigError, nearest
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["check_key", "config_error", "first_line", "setting_name"]

_SAMPLING = frozenset(one.name for one in fields(SamplingParams))


def setting_name(name: str, others: Iterable[str]) -> str:
    """Return our name of a setting that another library may call otherwise.

    Args:
        name: As it was given.
        others: All the names that were given.

    Raises:
        ConfigError: It means something else than ours, both were given, or it is in ``sampling``.
    """
    own = own_name(name, others)
    if own != name and own in _SAMPLING and own != "seed":
        raise ConfigError(f"unknown key {name!r}: it is sampling.{own} here", key=name)
    return own


def check_key(config: DictConfig, dotted: str) -> None:
    """Raise unless ``dotted`` is a key of ``config``, naming the nearest key beside it."""
    node: Any = config
    for depth, part in enumerate(parts := dotted.split(".")):
        where = ".".join(parts[:depth])
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{where!r} has no settings inside it", key=dotted)
        if OmegaConf.is_struct(node) is False:
            return
        if part not in node.keys():  # noqa: SIM118 - what still needs a value is a key, too
            inside = f" in {where!r}" if where else ""
            if not where and part in config.sampling:
                raise ConfigError(
                    f"unknown key {part!r}: did you mean 'sampling.{part}'?", key=dotted
                )
            raise ConfigError(
                f"unknown key {part!r}{inside}: {nearest(part, map(str, node))}", key=dotted
            )
        node = node._get_node(part)


def config_error(error: Exception) -> ConfigError:
    """Return an error of Hydra or OmegaConf as one line, with the key that it is about."""
    key = getattr(error, "full_key", None) or None
    reason = first_line(error)
    if isinstance(error, MissingMandatoryValue):
        key = key or reason.rpartition(" ")[2]
        return ConfigError(f"{key} needs a value: {key}=VALUE", key=key)
    file = re.match(r"In '(\w+)/([\w.-]+)'", reason)
    brought = settings_files().get((file[1], file[2])) if file else None
    if brought is not None:
        return ConfigError(f"plugin {brought.plugin!r}: {reason}", key=key)
    if key and "is not a ListConfig" in reason:
        return ConfigError(f"{key} must be a list: {key}=[...]", key=key)
    return ConfigError(f"{key}: {reason}" if key else reason, key=key)


def first_line(error: Exception) -> str:
    """Return the first line of an error, and the second if the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0] if lines else type(error).__name__
