"""Finding plugins and filling the registry from their hooks.

A plugin that is broken stops everything that looks a component up, even where another one is
asked for: if it were skipped, a name would be unknown or a step unobserved for no visible reason.
``DECODEKIT_DISABLE_PLUGINS=name,name`` switches plugins off, and ``decodekit plugins`` lists all of
them whatever their state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points, version
from shlex import quote
from typing import Any, Literal

import pluggy

from decodekit import hookspecs
from decodekit.config.plugins import builtin as builtins
from decodekit.config.plugins.hook_answers import (
    components_of,
    observers_of,
    settings_of,
)
from decodekit.config.plugins.registration import register
from decodekit.config.plugins.registry import Registry
from decodekit.config.plugins.settings_checks import problem_of
from decodekit.config.plugins.settings_files import SettingsFile
from decodekit.engine.observers import Observer, Observers
from decodekit.errors import PluginError, in_one_line
from decodekit.interfaces.component import Kind

__all__ = [
    "DISABLE_VARIABLE",
    "ENTRY_POINT_GROUP",
    "Installed",
    "Plugin",
    "build_registry",
    "installed",
    "new_observers",
    "registry",
    "settings_files",
    "switched_off",
]

ENTRY_POINT_GROUP = "decodekit"
DISABLE_VARIABLE = "DECODEKIT_DISABLE_PLUGINS"
"""An environment variable with the names of plugins, joined by commas, that are not loaded."""

_OWN = "decodekit"  # the name of the plugin with the built-in components


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plugin that is installed, in whatever state.

    Attributes:
        name: The name of its entry point; ``decodekit`` for what is built in.
        distribution: The package that brings it, as pip knows it.
        version: That package's version.
        state: ``on``; ``off`` if it is switched off; ``broken``.
        error: What is wrong with it, if it is broken.
        components: Kind and name of what it registers.
        settings: Group and name of its settings files.
        observes: Whether it is told of finished steps.
    """

    name: str
    distribution: str
    version: str
    state: Literal["on", "off", "broken"] = "on"
    error: PluginError | None = None
    components: tuple[tuple[Kind, str], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    observes: bool = False


@dataclass(slots=True)
class Installed:
    """All that the plugins of this process bring.

    Attributes:
        registry: The components of those that work.
        settings: Their settings files, by group and name.
        observers: Their observers.
        plugins: All plugins, the built-in one first, then by name.
    """

    registry: Registry = field(default_factory=Registry)
    settings: dict[tuple[str, str], SettingsFile] = field(default_factory=dict)
    observers: list[Observer] = field(default_factory=list)
    plugins: list[Plugin] = field(default_factory=list)

    def require_sound(self) -> Installed:
        """Return this one if no plugin is broken.

        Raises:
            PluginError: One is; the first of them, and how to go on without it.
        """
        for plugin in self.plugins:
            if plugin.error is not None:
                raise PluginError(
                    f"{plugin.error} (decodekit plugins lists all; "
                    f"{DISABLE_VARIABLE}={quote(plugin.name)} switches this one off)",
                    plugins=plugin.error.plugins,
                ) from plugin.error
        return self


@lru_cache(maxsize=1)
def installed() -> Installed:
    """Return what is installed, once per process; broken plugins are in the list only.

    Raises:
        PluginError: What says which packages are installed cannot be read.
    """
    off = switched_off()
    found = Installed()
    manager = _new_manager()
    _take(found, manager, Plugin(name=_OWN, distribution=_OWN, version=version(_OWN)), _built_in)
    seen: dict[str, EntryPoint] = {}
    for entry in _entries():
        distribution, its_version = _origin(entry)
        plugin = Plugin(name=entry.name, distribution=distribution, version=its_version)
        if entry.name.strip() in off:
            found.plugins.append(_with(plugin, state="off"))
            continue
        if entry.name == _OWN or entry.name in seen:
            other = _OWN if entry.name == _OWN else _origin(seen[entry.name])[0]
            error = PluginError(
                f"the distributions {other!r} and {distribution!r} both bring a plugin "
                f"{entry.name!r}; uninstall one of them",
                plugins=(entry.name,),
            )
            found.plugins.append(_with(plugin, state="broken", error=error))
            continue
        seen[entry.name] = entry
        _take(found, manager, plugin, entry.load)
    _check_files(found)
    return found


def _check_files(found: Installed) -> None:
    """Call those plugins broken whose settings files fit nothing, now that all are known."""
    for file in found.settings.values():
        problem = problem_of(file, found.registry)
        for place, plugin in enumerate(found.plugins):
            if problem is not None and plugin.name == file.plugin and plugin.state == "on":
                error = PluginError(f"plugin {file.plugin!r}: {problem}", plugins=(file.plugin,))
                found.plugins[place] = _with(plugin, state="broken", error=error)


def switched_off() -> frozenset[str]:
    """Return the names of plugins in the environment variable, installed or not."""
    value = os.environ.get(DISABLE_VARIABLE, "")
    # The value as a whole, too: nothing keeps a plugin from having a comma in its name.
    return frozenset(name.strip() for name in (*value.split(","), value) if name.strip())


def registry() -> Registry:
    """Return the registry of this process: built-ins, then the installed plugins.

    Raises:
        PluginError: A plugin cannot be imported, was written for another version of the plugin
            interface, or its hooks fail or clash.
    """
    return installed().require_sound().registry


def settings_files() -> dict[tuple[str, str], SettingsFile]:
    """Return the settings files that plugins bring, by group and name.

    Raises:
        PluginError: As for ``registry``.
    """
    return installed().require_sound().settings


def new_observers() -> Observers:
    """Return the step observers for one request.

    Raises:
        PluginError: As for ``registry``.
    """
    return Observers(installed().require_sound().observers)


def build_registry(manager: pluggy.PluginManager) -> Registry:
    """Return a registry with what every plugin of ``manager`` brings.

    Raises:
        PluginError: A hook fails, or two plugins register one name.
    """
    filled = Registry()
    for name, _ in manager.list_name_plugin():
        for kind, components in components_of(manager, name):
            filled.add(kind, components, plugin=name)
    return filled


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("decodekit")
    manager.add_hookspecs(hookspecs)
    return manager


def _entries() -> list[EntryPoint]:
    try:
        return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda one: one.name)
    except Exception as error:  # one damaged entry_points.txt is enough
        raise PluginError(
            f"the entry points of the installed packages cannot be read ({in_one_line(error)}); "
            "look for a damaged entry_points.txt, and reinstall its package"
        ) from error


def _origin(entry: EntryPoint) -> tuple[str, str]:
    """Return the name and version of the distribution that an entry point belongs to."""
    distribution = getattr(entry, "dist", None)
    if distribution is None:
        return "unknown", "unknown"
    # Both are None where the METADATA of a package is damaged.
    return distribution.name or "unknown", distribution.version or "unknown"


def _with(plugin: Plugin, **changes: Any) -> Plugin:
    values = {one.name: getattr(plugin, one.name) for one in fields(Plugin)}
    return Plugin(**{**values, **changes})


def _built_in() -> Any:
    return builtins


def _take(
    found: Installed, manager: pluggy.PluginManager, plugin: Plugin, load: Callable[[], Any]
) -> None:
    """Add to ``found`` what a plugin brings: all of it, or its error.

    Args:
        found: Is changed.
        manager: Gets to know the plugin if it can be loaded.
        plugin: What is known of it.
        load: Returns the plugin itself.
    """
    try:
        register(
            manager,
            plugin.name,
            load,
            distribution=plugin.distribution,
            version=plugin.version,
        )
        components = list(components_of(manager, plugin.name))
        files = settings_of(manager, plugin.name)
        observer = observers_of(manager, plugin.name)
        for file in files:
            known = found.settings.get((file.group, file.name))
            if known is not None:
                raise PluginError(
                    f"plugins {known.plugin!r} and {plugin.name!r} both bring the settings file "
                    f"{file.group}/{file.name}.yaml; uninstall one of them",
                    plugins=(known.plugin, plugin.name),
                )
        for kind, group in components:
            found.registry.add(kind, group, plugin=plugin.name)
    except PluginError as error:
        found.plugins.append(_with(plugin, state="broken", error=error))
        return
    found.settings.update({(file.group, file.name): file for file in files})
    found.observers.extend(observer)
    found.plugins.append(
        _with(
            plugin,
            components=tuple((kind, one.name) for kind, group in components for one in group),
            settings=tuple((file.group, file.name) for file in files),
            observes=bool(observer),
        )
    )
