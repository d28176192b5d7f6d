"""The hooks of a decodekit plugin. Built-in components come through the same ones.

A plugin is a module or object with functions of these names, marked with ``decodekit.hookimpl`` and
named by an entry point in the group ``decodekit``.
"""

from __future__ import annotations

import pluggy

from decodekit.registry import Component

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("decodekit")
hookimpl = pluggy.HookimplMarker("decodekit")


@hookspec
def decodekit_register_strategies() -> list[Component]:  # type: ignore[empty-body]
    """Return the strategies of this plugin."""


@hookspec
def decodekit_register_pools() -> list[Component]:  # type: ignore[empty-body]
    """Return the n-gram pools of this plugin."""


@hookspec
def decodekit_register_backends() -> list[Component]:  # type: ignore[empty-body]
    """Return the attention backends of this plugin."""


@hookspec
def decodekit_register_adapters() -> list[Component]:  # type: ignore[empty-body]
    """Return the model adapters of this plugin."""


@hookspec
def decodekit_register_verifiers() -> list[Component]:  # type: ignore[empty-body]
    """Return the verifiers of this plugin."""
