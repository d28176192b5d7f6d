"""What a plugin's settings file is checked against: the settings that it is for."""

from __future__ import annotations

from dataclasses import fields
from importlib.resources import files

from decodekit.config.plugins.registry import GROUPS, Registry
from decodekit.config.plugins.settings_files import SettingsFile
from decodekit.errors import nearest
from decodekit.interfaces.component import ModelConfig
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["problem_of"]


def problem_of(file: SettingsFile, components: Registry) -> str | None:
    """Return what is wrong with a settings file, None if nothing is.

    Only what is said in the file itself is looked at; a ``defaults`` list may add more.

    Args:
        file: The file.
        components: Those of all plugins.
    """
    place = f"{file.group}/{file.name}.yaml"
    if (files("decodekit.conf") / file.group / f"{file.name}.yaml").is_file():
        return f"{place} is a settings file of decodekit itself; give it another name"
    kind = GROUPS[file.group]
    if kind is None:
        schema: type = ModelConfig if file.group == "model" else SamplingParams
        adapter = file.content.get("adapter")
        if file.group == "model" and adapter not in (None, *components.names("adapter")):
            return f"{place} needs an unknown adapter {adapter!r}: " + nearest(
                str(adapter), components.names("adapter")
            )
    else:
        name = file.content.get("name", file.name)
        names = components.names(kind)
        if file.name in names and name != file.name:
            return f"{place} must be for the {kind} {file.name!r}, not for {name!r}; rename it"
        owner = components.get(kind, file.name).plugin if file.name in names else file.plugin
        if owner != file.plugin:
            whose = "decodekit itself" if owner == "decodekit" else "another plugin"
            return f"{place} hides the {kind} {file.name!r} of {whose}; rename it"
        if name not in names:
            if file.content.get("defaults") and "name" not in file.content:
                return None  # its name comes from another file
            return f"{place} is for an unknown {kind} {name!r}; write name: NAME, " + nearest(
                str(name), names
            )
        schema = components.get(kind, name).config
    known = [one.name for one in fields(schema)]
    for key in file.content:
        if key not in known and key != "defaults":
            return f"unknown key {key!r} in {place}: {nearest(str(key), known)}"
    return None
