"""The hooks of a decodekit plugin. Built-in components come through the same ones.

A plugin is a module or object with functions of these names, marked with ``decodekit.hookimpl`` and
named by an entry point in the group ``decodekit``. It says which version of this interface it was
written for in an attribute ``decodekit_api_version``.
"""

from __future__ import annotations

import pluggy

from decodekit.interfaces.component import Component
from decodekit.interfaces.events import StepEvent

__all__ = ["API_VERSION", "hookimpl", "hookspec"]

API_VERSION = 1
"""The version of the plugin interface: these hooks, ``registry.Component`` and ``interfaces``.

It goes up by one when a plugin that is written for it would no longer work.
"""

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


@hookspec
def decodekit_config_package() -> str:  # type: ignore[empty-body]
    """Return the name of an importable package with settings files, ``GROUP/NAME.yaml``.

    The groups are those of ``conf/``: a file in ``model/`` is a model for ``model=NAME``, one in
    ``strategy/`` settings of a registered strategy for ``strategy=NAME``.
    """


@hookspec
def decodekit_step_finished(event: StepEvent) -> None:
    """Take note of a step that is finished, for one sequence.

    Called once per sequence and step, after the reader of a stream has been given the tokens. What
    it does takes time from the decoding, so it should be quick.
    """
