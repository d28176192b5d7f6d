"""Plugins as they look when they are installed, without installing anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from decodekit.hookspecs import hookimpl


class Entry:
    """An installed entry point that loads to ``plugin``, or cannot be loaded."""

    def __init__(self, name: str, plugin: Any, *, dist: str = "some-dist") -> None:
        self.name = name
        self.plugin = plugin
        self.dist = SimpleNamespace(name=dist, version="1.2")

    def load(self) -> Any:
        if isinstance(self.plugin, BaseException):
            raise self.plugin
        return self.plugin


def plugin(hook: str, answer: Any) -> SimpleNamespace:
    """Return a plugin whose one hook returns ``answer``, or raises it."""

    def implementation() -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    implementation.__name__ = hook
    return SimpleNamespace(**{hook: hookimpl(implementation)})
