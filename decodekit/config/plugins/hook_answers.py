"""What one plugin answers to the hooks, checked: components, settings files, an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from inspect import iscoroutinefunction
from typing import Any

import pluggy

from decodekit.config.plugins.registry import GROUPS, NAME_RULE, is_name
from decodekit.config.plugins.settings_files import SettingsFile, read_settings_files
from decodekit.engine.observers import Observer
from decodekit.errors import DecodekitError, PluginError, in_one_line, shortened
from decodekit.interfaces.component import Component, Kind
from decodekit.interfaces.events import StepEvent

__all__ = ["components_of", "observers_of", "settings_of"]

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
            if not isinstance(answer, Iterable) or isinstance(answer, Mapping):
                raise _no_components(name, hook, answer)
            try:
                components = list(answer)
            except (Exception, SystemExit) as error:
                raise _failed(name, hook, error) from error
            if not all(isinstance(component, Component) for component in components):
                raise _no_components(name, hook, answer)
            for component in components:
                _check(component, kind, name)
            yield kind, components


def _no_components(name: str, hook: str, answer: object) -> PluginError:
    return PluginError(
        f"plugin {name!r} failed in {hook}: it must return Components, a list of them, not "
        f"{shortened(answer)}",
        plugins=(name,),
    )


def _check(component: Component, kind: Kind, plugin: str) -> None:
    problem = _problem(component, kind)
    if problem is not None:
        raise PluginError(f"plugin {plugin!r}: {problem}", plugins=(plugin,))


def _problem(component: Component, kind: Kind) -> str | None:
    """Return what is wrong with a component, None if nothing is."""
    what = f"{kind} {component.name!r}"
    if not is_name(component.name):
        return f"{component.name!r} cannot be the name of a {kind}; a name is {NAME_RULE}"
    if _config_name(component) != component.name:
        return (
            f"the config of the {what} must be a dataclass with a field name whose default is "
            f"{component.name!r}"
        )
    if vars(component.config)["__dataclass_params__"].frozen:
        return f"the config of the {what} must not be frozen; its values are set one by one"
    if any(one.name == "defaults" for one in fields(component.config)):
        return f"the config of the {what} has a field 'defaults', which Hydra reads; rename it"
    fixed = [one.name for one in fields(component.config) if not one.init]
    if fixed:
        return f"the config of the {what} has a field {fixed[0]!r} with init=False; leave it out"
    if not callable(component.build):
        return f"the {what} has a build that cannot be called"
    if component.load is not None and (kind != "adapter" or not callable(component.load)):
        return f"the {what} has a load; only adapters have one, a function"
    failure = _failure_of_defaults(component.config)
    return None if failure is None else f"the settings of the {what} fail: {failure}"


def _failure_of_defaults(config: Callable[[], object]) -> str | None:
    """Return why settings cannot be made of their defaults, None if they can.

    A range or a value that the user still has to give is no failure.
    """
    own = [one for one in fields(config) if one.init]  # type: ignore[arg-type]
    if any(one.default is MISSING and one.default_factory is MISSING for one in own):
        return None
    try:
        config()
    except (DecodekitError, ValueError):
        return None
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {in_one_line(error)}"
    return None


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
        PluginError: It is a wrapper, or a coroutine function, which nobody would await.
    """
    for one in _implementations(manager, name, _OBSERVE):
        if iscoroutinefunction(one.function):
            raise PluginError(
                f"plugin {name!r} failed in {_OBSERVE}: it must be a plain function, not async",
                plugins=(name,),
            )
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
        except (Exception, SystemExit) as error:
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


def _failed(name: str, hook: str, error: BaseException) -> PluginError:
    return PluginError(f"plugin {name!r} failed in {hook}: {in_one_line(error)}", plugins=(name,))
