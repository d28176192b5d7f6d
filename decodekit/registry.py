"""What is installed: the components of every kind, by name, each with the plugin it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, get_args

from decodekit.errors import ConfigError, DecodekitError, PluginError, nearest

__all__ = ["GROUPS", "KINDS", "NAME_RULE", "Component", "Kind", "Registry", "is_name"]

Kind = Literal["strategy", "pool", "backend", "adapter", "verifier"]
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


@dataclass(frozen=True, slots=True)
class Component:
    """One thing that can be chosen by name.

    Attributes:
        name: What a user writes, for example ``lookahead`` in ``strategy=lookahead``.
        config: A keyword-only dataclass of its settings with a field ``name``; it is the Hydra
            schema and the first argument of ``build``.
        build: Makes the component. Called as

            * strategy: ``build(config, parts)``, a ``Strategy``; see ``interfaces.Parts``
            * pool: ``build(config)``, an ``NGramPool``
            * backend: ``build(config)``, an ``AttentionBackend``
            * adapter: ``build(config, model, backend)``, a ``ModelAdapter``
            * verifier: ``build(config)``, a ``Verifier``
        load: For an adapter of models that ``transformers`` does not load: called as
            ``load(config, model, dtype=..., device=...)`` with the ``ModelConfig`` and the two
            settings as the user gave them, ``auto`` included. It returns the model, which
            ``build`` then gets, and its tokenizer or None. A file in ``model/`` names such an
            adapter under ``adapter``.
        plugin: The plugin that registered it; filled in at registration.
    """

    name: str
    config: type
    build: Callable[..., Any]
    load: Callable[..., Any] | None = None
    plugin: str = ""

    def configure(self, kind: Kind, values: dict[str, Any]) -> Any:
        """Return this component's settings dataclass.

        Args:
            kind: What it is, for messages.
            values: Fields of the dataclass by name; the others have their defaults.

        Raises:
            ConfigError: A key is unknown or missing, or a value is refused.
            PluginError: The dataclass of a plugin fails otherwise.
        """
        own = [one for one in fields(self.config) if one.init]
        known = [one.name for one in own]
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"unknown key {key!r} in {kind!r}: {nearest(str(key), known)}",
                    key=f"{kind}.{key}",
                )
        for one in own:
            if one.default is MISSING and one.default_factory is MISSING and one.name not in values:
                raise ConfigError(
                    f"{kind} {self.name!r} needs a value for {one.name!r}: {kind}.{one.name}=VALUE",
                    key=f"{kind}.{one.name}",
                )
        try:
            return self.config(**values)
        except DecodekitError:
            raise
        except ValueError as error:  # a range that it checks itself
            message = f"{kind} {self.name!r}: {' '.join(str(error).split())}"
            raise ConfigError(message, key=kind) from error
        except Exception as error:
            raise PluginError(
                f"plugin {self.plugin!r}: the settings of the {kind} {self.name!r} fail: "
                f"{type(error).__name__}: {' '.join(str(error).split())}",
                plugins=(self.plugin,),
            ) from error


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
