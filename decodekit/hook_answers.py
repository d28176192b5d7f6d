"""What one plugin answers to the hooks, checked: components, settings files, an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pluggy

from decodekit.errors import PluginError
from decodekit.observers import Observer, StepEvent
from decodekit.registry import GROUPS, Component, Kind
from decodekit.settings_files import SettingsFile, read_settings_files

__all__ = ["components_of", "observers_of", "one_line_of", "settings_of"]

_OBSERVE = "decodekit_step_finished"
_CONFIGS = "decodekit_config_package"
_HOOKS: dict[Kind, str] = {
    "strategy": "decodekit_register_strategies",
    "pool": "decodekit_register_pools",
    "backend": "decodekit_register_backends",
    "adapter": "decodekit_register_adapters",
    "verifier": "decodekit_register_verifiers",
}


def components_of(
    manager: pluggy.PluginManager, name: str
) -> Iterator[tuple[Kind, list[Component]]]:
    """Yield the components of the plugin ``name``, kind by kind.

    Raises:
        PluginError: A hook fails, or returns what is no component.
    """
    for kind, hook in _HOOKS.items():
        for answer in _answers(manager, name, hook):
            try:
                components = list(answer)
            except Exception as error:
                raise _failed(name, hook, error) from error
            if not all(isinstance(component, Component) for component in components):
                raise PluginError(
                    f"plugin {name!r} failed in {hook}: it must return Components", plugins=(name,)
                )
            for component in components:
                _check(component, kind, name)
            yield kind, components


def _check(component: Component, kind: Kind, plugin: str) -> None:
    start = f"plugin {plugin!r}: the {kind} {component.name!r}"
    if _config_name(component) != component.name:
        raise PluginError(
            f"plugin {plugin!r}: the config of the {kind} {component.name!r} must be a "
            f"dataclass with a field name whose default is {component.name!r}",
            plugins=(plugin,),
        )
    if not callable(component.build):
        raise PluginError(f"{start} has a build that cannot be called", plugins=(plugin,))
    if component.load is not None and (kind != "adapter" or not callable(component.load)):
        raise PluginError(
            f"{start} has a load; only adapters have one, a function", plugins=(plugin,)
        )


def _config_name(component: Component) -> object:
    """Return the default of the field ``name`` of a component's config; None if there is none."""
    if not (isinstance(component.config, type) and is_dataclass(component.config)):
        return None
    return next((one.default for one in fields(component.config) if one.name == "name"), None)


def settings_of(manager: pluggy.PluginManager, name: str) -> list[SettingsFile]:
    """Return the settings files of the plugin ``name``.

    Raises:
        PluginError: They cannot be read.
    """
    found: list[SettingsFile] = []
    for package in _answers(manager, name, _CONFIGS):
        if not isinstance(package, str):
            raise PluginError(
                f"plugin {name!r} failed in {_CONFIGS}: it must return the name of a package",
                plugins=(name,),
            )
        found += read_settings_files(package, groups=GROUPS, plugin=name)
    return found


def observers_of(manager: pluggy.PluginManager, name: str) -> list[Observer]:
    """Return what the plugin ``name`` wants to be called with each event: one function, or none.

    Raises:
        PluginError: It is a wrapper.
    """
    return [
        # A hook may leave out arguments that it does not need.
        Observer(name, one.function if one.argnames else _without_event(one.function))
        for one in _implementations(manager, name, _OBSERVE)
    ]


def _without_event(function: Callable[[], object]) -> Callable[[StepEvent], object]:
    return lambda _: function()


def _answers(manager: pluggy.PluginManager, name: str, hook: str) -> Iterator[Any]:
    for implementation in _implementations(manager, name, hook):
        try:
            answer = implementation.function()
        except Exception as error:
            raise _failed(name, hook, error) from error
        yield answer


def _implementations(
    manager: pluggy.PluginManager, name: str, hook: str
) -> Iterator[pluggy.HookImpl]:
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        if implementation.plugin_name != name:
            continue
        if implementation.wrapper or implementation.hookwrapper:
            raise PluginError(
                f"plugin {name!r} failed in {hook}: wrappers of hooks are not supported",
                plugins=(name,),
            )
        yield implementation


def _failed(name: str, hook: str, error: Exception) -> PluginError:
    return PluginError(f"plugin {name!r} failed in {hook}: {one_line_of(error)}", plugins=(name,))


def one_line_of(error: BaseException) -> str:
    """Return what an error says in one line; its type if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
