"""Making our settings files and the registered schemas known to Hydra, for a while."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote
from typing import Any

from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import MISSING

from decodekit.config.plugins.installed import DISABLE_VARIABLE, registry, settings_files
from decodekit.config.plugins.registry import GROUPS
from decodekit.config.plugins.settings_files import SettingsFile
from decodekit.config.schema import RunConfig
from decodekit.errors import PluginError
from decodekit.interfaces.component import ModelConfig
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["hydra_session"]

_LOCK = threading.RLock()


@contextmanager
def hydra_session() -> Iterator[None]:
    """Make our files and the registered schemas composable inside the block.

    Hydra's state is global. An application that uses Hydra itself, or calls us from inside its own
    main function, finds everything as it was afterwards. Threads take turns.
    """
    with _LOCK:
        yield from _session()


def _session() -> Iterator[None]:
    store = ConfigStore.instance()
    groups = ("schema", *GROUPS)
    held = {group: copy.deepcopy(store.repo[group]) for group in groups if group in store.repo}
    before = (GlobalHydra.instance().hydra, VersionBase.instance().version_base)
    GlobalHydra.instance().clear()
    try:
        _store_schemas(store)
        with initialize_config_module("decodekit.conf", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra, VersionBase.instance().version_base = before
        for group in groups:
            store.repo.pop(group, None)
        store.repo.update(held)


def _store_schemas(store: ConfigStore) -> None:
    store.store("run", _schema(), group="schema")
    store.store("model", ModelConfig, group="schema")
    store.store("sampling", SamplingParams, group="schema")
    components, brought = registry(), settings_files()
    for group, kind in GROUPS.items():
        if kind is None:
            continue
        for name in components.names(kind):
            component = components.get(kind, name)
            what = f"the config of the {kind} {name!r} cannot be a Hydra schema"
            with _naming(component.plugin, what):
                store.store(name, component.config, group=f"schema/{group}")
                if (group, name) not in brought:  # a plugin's own file has other defaults
                    store.store(name, component.config, group=group)
    for file in brought.values():
        with _naming(file.plugin, f"{file.group}/{file.name}.yaml cannot be used"):
            store.store(file.name, _complete(file), group=file.group, provider=file.plugin)


@contextmanager
def _naming(plugin: str, what: str) -> Iterator[None]:
    """Let an error of OmegaConf, or of what it asks of a plugin's class, name the plugin."""
    try:
        yield
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        key = getattr(error, "full_key", None)
        raise PluginError(
            f"plugin {plugin!r}: {what}: {f'{key}: ' if key else ''}{lines[0]} "
            f"({DISABLE_VARIABLE}={quote(plugin)} switches this plugin off)",
            plugins=(plugin,),
        ) from error


def _complete(file: SettingsFile) -> dict[str, Any]:
    """Return a plugin's settings file on top of the schema that it is for, unless it says which."""
    content = dict(file.content)
    schema = file.group
    kind = GROUPS[file.group]
    if kind is not None:
        schema = f"{file.group}/{content.get('name', file.name)}"
    elif file.group == "model":
        content.setdefault("name", file.name)
    given = content.get("defaults", ["_self_"])
    # Without a schema any key would do, and no type would be checked.
    open_ = kind is not None and content.get("name", file.name) not in registry().names(kind)
    if not open_ and not any("schema/" in str(one) for one in given):
        given = [f"/schema/{schema}@_here_", *given]
    return {**content, "defaults": given}


def _schema() -> type:
    """Return ``RunConfig`` with each group left open: its files bring their own schemas."""
    return dataclasses.make_dataclass(
        "RunSchema",
        [(group, Any, dataclasses.field(default=MISSING)) for group in GROUPS],
        bases=(RunConfig,),
        kw_only=True,
    )
