"""The settings files that a plugin brings: ``GROUP/NAME.yaml`` in a package of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from decodekit.errors import PluginError

__all__ = ["SettingsFile", "read_settings_files"]


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """One choice of a settings group.

    Attributes:
        group: The group, for example ``model``.
        name: What a user writes after ``group=``.
        content: The file as YAML has it; a ``defaults`` list in it is Hydra's.
        plugin: The plugin that brings it.
    """

    group: str
    name: str
    content: dict[str, Any]
    plugin: str


def read_settings_files(
    package: str, *, groups: Collection[str], plugin: str
) -> list[SettingsFile]:
    """Read every settings file of a package.

    Args:
        package: The package's name; it is imported.
        groups: The groups that there are.
        plugin: Whose files they are.

    Raises:
        PluginError: The package is not there or has no file, a directory is no group, or a file is
            no mapping in YAML.
    """
    try:
        root = files(package)
        directories = sorted(
            (entry for entry in root.iterdir() if entry.is_dir() and entry.name[0] not in "._"),
            key=lambda entry: entry.name,
        )
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise PluginError(
            f"plugin {plugin!r}: its settings package {package!r} cannot be read: {error}",
            plugins=(plugin,),
        ) from error
    found: list[SettingsFile] = []
    for directory in directories:
        if directory.name not in groups:
            raise PluginError(
                f"plugin {plugin!r}: {package!r} has a directory {directory.name!r}, which is no "
                f"group of settings; the groups are {', '.join(sorted(groups))}",
                plugins=(plugin,),
            )
        for file in sorted(directory.iterdir(), key=lambda entry: entry.name):
            stem, dot, ending = file.name.rpartition(".")
            if dot and ending == "yaml":
                content = _mapping(file.read_bytes(), f"{directory.name}/{file.name}", plugin)
                found.append(SettingsFile(directory.name, stem, content, plugin))
    if not found:
        raise PluginError(
            f"plugin {plugin!r}: its settings package {package!r} has no file GROUP/NAME.yaml; is "
            "it in the package data of the distribution?",
            plugins=(plugin,),
        )
    return found


def _mapping(text: bytes, place: str, plugin: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise PluginError(
            f"plugin {plugin!r}: {place} is no YAML: {reason}", plugins=(plugin,)
        ) from error
    if not isinstance(content, dict):
        raise PluginError(f"plugin {plugin!r}: {place} must hold key: value", plugins=(plugin,))
    return content
