"""Finding plugins and filling the registry from their hooks."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.metadata import entry_points

import pluggy

from decodekit import builtins, hookspecs
from decodekit.errors import PluginError
from decodekit.registry import Component, Kind, Registry

__all__ = ["ENTRY_POINT_GROUP", "build_registry", "registry"]

ENTRY_POINT_GROUP = "decodekit"

_HOOKS: dict[Kind, str] = {
    "strategy": "decodekit_register_strategies",
    "pool": "decodekit_register_pools",
    "backend": "decodekit_register_backends",
    "adapter": "decodekit_register_adapters",
    "verifier": "decodekit_register_verifiers",
}


def build_registry(manager: pluggy.PluginManager) -> Registry:
    """Return a registry with what every plugin of ``manager`` brings.

    Raises:
        PluginError: A hook fails, or two plugins register one name.
    """
    registry = Registry()
    for kind, hook in _HOOKS.items():
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            name = implementation.plugin_name
            try:
                components = list(implementation.function())
            except Exception as error:
                raise PluginError(
                    f"plugin {name!r} failed in {hook}: {error}", plugins=(name,)
                ) from error
            if not all(isinstance(component, Component) for component in components):
                raise PluginError(
                    f"plugin {name!r} failed in {hook}: it must return Components", plugins=(name,)
                )
            registry.add(kind, components, plugin=name)
            for component in components:
                if _config_name(component) != component.name:
                    raise PluginError(
                        f"plugin {name!r}: the config of the {kind} {component.name!r} must be a "
                        f"dataclass with a field name whose default is {component.name!r}",
                        plugins=(name,),
                    )
    return registry


def _config_name(component: Component) -> object:
    """Return the default of the field ``name`` of a component's config; None if there is none."""
    if not (isinstance(component.config, type) and is_dataclass(component.config)):
        return None
    return next((one.default for one in fields(component.config) if one.name == "name"), None)


@lru_cache(maxsize=1)
def registry() -> Registry:
    """Return the registry of this process: built-ins, then the installed plugins.

    Raises:
        PluginError: A plugin cannot be imported, or its hooks fail or clash.
    """
    manager = pluggy.PluginManager("decodekit")
    manager.add_hookspecs(hookspecs)
    manager.register(builtins, name="decodekit")
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            manager.register(entry.load(), name=entry.name)
        except Exception as error:
            raise PluginError(
                f"plugin {entry.name!r} cannot be loaded: {error}; uninstall or repair it",
                plugins=(entry.name,),
            ) from error
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"a plugin has an unknown hook: {error}") from error
    return build_registry(manager)
