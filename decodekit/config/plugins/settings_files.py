"""The settings files that a plugin brings: ``GROUP/NAME.yaml`` in a package of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

from decodekit.config.plugins.registry import NAME_RULE, is_name
from decodekit.errors import PluginError, in_one_line

if TYPE_CHECKING:
    from importlib.abc import Traversable

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
        directories = _entries(root, directories=True)
    except (Exception, SystemExit) as error:  # importing it runs its code
        raise PluginError(
            f"plugin {plugin!r}: its settings package {package!r} cannot be read: "
            f"{in_one_line(error)}",
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
        for file in _entries(directory, directories=False):
            stem, _, ending = file.name.rpartition(".")
            if ending not in ("yaml", "yml"):
                continue
            place = f"{directory.name}/{file.name}"
            if ending == "yml" or not is_name(stem):
                raise PluginError(
                    f"plugin {plugin!r}: {place} must be called NAME.yaml; a name is {NAME_RULE}",
                    plugins=(plugin,),
                )
            content = _mapping(_read(file, place, plugin), place, plugin)
            found.append(SettingsFile(directory.name, stem, content, plugin))
    if not found:
        raise PluginError(
            f"plugin {plugin!r}: its settings package {package!r} has no file GROUP/NAME.yaml; is "
            "it in the package data of the distribution?",
            plugins=(plugin,),
        )
    return found


def _entries(place: Traversable, *, directories: bool) -> list[Traversable]:
    """Return the directories, or the files, in a directory; those of Python itself left out."""
    found = [one for one in place.iterdir() if one.is_dir() == directories]
    return sorted(
        (one for one in found if not directories or one.name[0] not in "._"),
        key=lambda one: one.name,
    )


def _read(file: Traversable, place: str, plugin: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise PluginError(
            f"plugin {plugin!r}: {place} cannot be read: {error.strerror or error}",
            plugins=(plugin,),
        ) from error


def _mapping(text: bytes, place: str, plugin: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PluginError(
            f"plugin {plugin!r}: {place} is no YAML: {in_one_line(error)}", plugins=(plugin,)
        ) from error
    if not isinstance(content, dict):
        raise PluginError(f"plugin {plugin!r}: {place} must hold key: value", plugins=(plugin,))
    if not isinstance(content.get("defaults", []), list):
        raise PluginError(
            f"plugin {plugin!r}: defaults of {place} must be a list", plugins=(plugin,)
        )
    return content
