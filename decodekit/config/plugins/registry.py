"""What is installed: the components of every kind, by name, each with the plugin it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from decodekit.errors import ConfigError, PluginError, nearest
from decodekit.interfaces.component import Component, Kind

__all__ = ["GROUPS", "KINDS", "NAME_RULE", "Registry", "is_name"]

KINDS: tuple[Kind, ...] = get_args(Kind)

GROUPS: dict[str, Kind | None] = {
    "strategy": "strategy",
    "backend": "backend",
    "adapter": "adapter",
    "verifier": "verifier",
    "model": None,
    "sampling": None,
}
"""The groups of settings that a name can be chosen for, with the kind of component behind it."""

NAME_RULE = "letters, digits, _, - and ., beginning with a letter, such as my-strategy"
"""What a name is made of, so that ``strategy=NAME`` needs no quotes and means itself."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_WORDS = ("null", "true", "false", "nan", "inf", "infinity")  # Hydra reads these as values


def is_name(text: object) -> bool:
    """Return whether ``text`` can be the name of a component or of a settings file."""
    return (
        isinstance(text, str)
        and _NAME.fullmatch(text) is not None
        and text.lower() not in _WORDS
        and not text.endswith((".yaml", ".yml"))
    )


class Registry:
    """Components by kind and name."""

    def __init__(self) -> None:
        self._components: dict[Kind, dict[str, Component]] = {kind: {} for kind in KINDS}

    def add(self, kind: Kind, components: Iterable[Component], *, plugin: str) -> None:
        """Register what ``plugin`` brings.

        Raises:
            PluginError: Another plugin has registered the name already.
        """
        for component in components:
            known = self._components[kind].get(component.name)
            if known is not None and known.plugin == plugin:
                raise PluginError(
                    f"plugin {plugin!r} registers the {kind} {component.name!r} twice",
                    plugins=(plugin,),
                )
            if known is not None:
                raise PluginError(
                    f"plugins {known.plugin!r} and {plugin!r} both register the {kind} "
                    f"{component.name!r}; uninstall one of them",
                    plugins=(known.plugin, plugin),
                )
            self._components[kind][component.name] = replace(component, plugin=plugin)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Return the registered names of a kind, sorted."""
        return tuple(sorted(self._components[kind]))

    def get(self, kind: Kind, name: str) -> Component:
        """Return a component.

        Raises:
            ConfigError: There is none of that name; the message has the nearest one.
        """
        try:
            return self._components[kind][name]
        except KeyError:
            hint = nearest(name, self.names(kind))
            raise ConfigError(f"unknown {kind} {name!r}: {hint}", key=kind, value=name) from None
