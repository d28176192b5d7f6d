"""``decodekit plugins``: what is installed, where it came from, and what is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from decodekit.cli.table import render_table
from decodekit.config.plugins.installed import DISABLE_VARIABLE, Plugin, installed, switched_off
from decodekit.errors import ConfigError
from decodekit.hookspecs import API_VERSION

__all__ = ["run_plugins"]


def run_plugins(arguments: Sequence[str]) -> int:
    """Print the installed plugins and what each brings.

    Args:
        arguments: None, ``format=text`` or ``format=json``.

    Returns:
        The exit code: 1 if a plugin is broken, else 0.

    Raises:
        ConfigError: There is another argument.
    """
    form = "text"
    for argument in arguments:
        if argument not in ("format=text", "format=json"):
            raise ConfigError(
                f"decodekit plugins takes format=text or format=json, not {argument}", key="format"
            )
        form = argument.partition("=")[2]
    plugins = installed().plugins
    if form == "json":
        print(json.dumps({"api_version": API_VERSION, "plugins": list(map(_record, plugins))}))
    else:
        print(_text(plugins))
    return int(any(plugin.state == "broken" for plugin in plugins))


def _record(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "state": plugin.state,
        "error": None if plugin.error is None else str(plugin.error),
        "components": [{"kind": kind, "name": name} for kind, name in plugin.components],
        "settings": [{"group": group, "name": name} for group, name in plugin.settings],
        "observes": plugin.observes,
    }


def _text(plugins: Sequence[Plugin]) -> str:
    rows = [["kind", "name", "plugin", "distribution", "version"]]
    for plugin in plugins:
        rows += [
            [kind, name, plugin.name, plugin.distribution, plugin.version]
            for kind, name in _entries(plugin)
        ]
    lines = [f"plugin interface: version {API_VERSION}", "", render_table(rows)]
    off = [plugin.name for plugin in plugins if plugin.state == "off"]
    if off:
        lines += ["", f"switched off by {DISABLE_VARIABLE}: {', '.join(off)}"]
    unknown = sorted(
        name for name in switched_off() - {plugin.name for plugin in plugins} if "," not in name
    )
    if unknown:
        lines += ["", f"in {DISABLE_VARIABLE}, but not installed: {', '.join(unknown)}"]
    broken = [plugin for plugin in plugins if plugin.state == "broken"]
    if broken:
        lines += ["", f"BROKEN (nothing runs until it is repaired, or in {DISABLE_VARIABLE}):"]
        lines += [f"  {one.name} ({one.distribution} {one.version}): {one.error}" for one in broken]
    return "\n".join(lines)


def _entries(plugin: Plugin) -> Iterator[tuple[str, str]]:
    """Yield kind and name of all that a plugin brings."""
    yield from plugin.components
    # A file of the name of its component is that component's settings.
    known = set(plugin.components)
    yield from ((group, name) for group, name in plugin.settings if (group, name) not in known)
    if plugin.observes:
        yield "observer", plugin.name
