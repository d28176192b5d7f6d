"""Making our settings files and the registered schemas known to Hydra, for a while."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import MISSING

from decodekit.config import ModelConfig, RunConfig
from decodekit.errors import PluginError
from decodekit.params import SamplingParams
from decodekit.plugins import registry, settings_files
from decodekit.registry import GROUPS
from decodekit.settings_files import SettingsFile

__all__ = ["hydra_session"]


@contextmanager
def hydra_session() -> Iterator[None]:
    """Make our files and the registered schemas composable inside the block.

    Hydra's state is global. An application that uses Hydra itself, or calls us from inside its own
    main function, finds everything as it was afterwards.
    """
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
            store.store(name, component.config, group=f"schema/{group}")
            # Built-ins have files in conf/, and a plugin may have one too.
            if component.plugin != "decodekit" and (group, name) not in brought:
                store.store(name, component.config, group=group)
    for file in brought.values():
        if (files("decodekit.conf") / file.group / f"{file.name}.yaml").is_file():
            raise PluginError(
                f"plugin {file.plugin!r} brings the settings file {file.group}/{file.name}.yaml, "
                "which decodekit has itself; it needs another name",
                plugins=("decodekit", file.plugin),
            )
        store.store(file.name, _complete(file), group=file.group, provider=file.plugin)


def _complete(file: SettingsFile) -> dict[str, Any]:
    """Return a plugin's settings file on top of the schema that it is for, unless it says which."""
    content = dict(file.content)
    schema = file.group
    if GROUPS[file.group] is not None:
        schema = f"{file.group}/{content.get('name', file.name)}"
    elif file.group == "model":
        content.setdefault("name", file.name)
    content.setdefault("defaults", [f"/schema/{schema}@_here_", "_self_"])
    return content


def _schema() -> type:
    """Return ``RunConfig`` with each group left open: its files bring their own schemas."""
    return dataclasses.make_dataclass(
        "RunSchema",
        [(group, Any, dataclasses.field(default=MISSING)) for group in GROUPS],
        bases=(RunConfig,),
        kw_only=True,
    )
