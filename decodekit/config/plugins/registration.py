"""Loading one plugin: its version, and which hooks it has."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static, isfunction
from typing import Any

import pluggy

from decodekit import hookspecs
from decodekit.errors import PluginError, in_one_line, nearest
from decodekit.hookspecs import API_VERSION

__all__ = ["register"]


def register(
    manager: pluggy.PluginManager,
    name: str,
    load: Callable[[], Any],
    *,
    distribution: str,
    version: str,
) -> None:
    """Load a plugin and register its hooks.

    Args:
        manager: Gets to know the plugin if it can be loaded.
        name: The plugin's name.
        load: Returns the module or object with its hooks.
        distribution: The package that brings it.
        version: That package's version.

    Raises:
        PluginError: It cannot be loaded, was written for another version of the plugin interface,
            or has no hook, an unknown one or one that is not marked.
    """
    try:
        loaded = load()
        written_for = getattr(loaded, "decodekit_api_version", API_VERSION)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {name!r} cannot be loaded: {in_one_line(error)}; uninstall or repair "
            f"{distribution}",
            plugins=(name,),
        ) from error
    if written_for != API_VERSION:
        if not isinstance(written_for, int):
            fix = "it must be a whole number"
        elif written_for > API_VERSION:
            fix = f"upgrade decodekit, which has version {API_VERSION}"
        else:
            fix = f"upgrade {distribution} to one for version {API_VERSION}"
        raise PluginError(
            f"plugin {name!r} ({distribution} {version}) was written for version "
            f"{written_for!r} of the plugin interface: {fix}",
            plugins=(name,),
        )
    try:
        known = manager.get_name(loaded)
        if known is not None:
            raise ValueError(f"it is the same object as the plugin {known!r}; keep one entry point")
        _register_hooks(manager, name, loaded)
    except (pluggy.PluginValidationError, ValueError) as error:
        if manager.has_plugin(name):
            manager.unregister(name=name)
        raise PluginError(f"plugin {name!r}: {in_one_line(error)}", plugins=(name,)) from error


def _register_hooks(manager: pluggy.PluginManager, name: str, loaded: Any) -> None:
    """Register the hooks of a plugin.

    Raises:
        ValueError: One is unknown, or is not marked, or there is none.
    """
    hooks = [one for one in dir(hookspecs) if one.startswith("decodekit_")]
    manager.register(loaded, name=name)
    callers = manager.get_hookcallers(loaded) or ()
    for caller in callers:
        optional = all(one.optionalhook for one in caller.get_hookimpls())
        if not caller.has_spec() and not optional:
            raise ValueError(f"unknown hook {caller.name!r}: {nearest(caller.name, hooks)}")
    found = {caller.name for caller in callers}
    for hook in hooks:
        if hook in found and isinstance(loaded, type) and isfunction(getattr_static(loaded, hook)):
            raise ValueError("it is a class; its entry point must name a module or an object")
        if hook not in found and callable(getattr(loaded, hook, None)):
            raise ValueError(f"{hook} is not marked; write @decodekit.hookimpl above it")
    if not found:
        raise ValueError(
            "it has no hook; its entry point must name the module or object with the functions "
            f"that are marked with @decodekit.hookimpl, {hooks[-2]} for example"
        )
