"""From hooks to the registry: built-ins, other plugins, and plugins that are broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from decodekit import builtins, hookspecs, plugins
from decodekit.errors import PluginError
from decodekit.hookspecs import hookimpl
from decodekit.interfaces import AttentionBackend, NGramPool, Strategy, Verifier
from decodekit.params import SamplingParams
from decodekit.plugins import ENTRY_POINT_GROUP, build_registry, registry
from decodekit.pool import RecentNGramPool
from decodekit.registry import KINDS, Component, Registry
from decodekit.strategies.jacobi import JacobiConfig


@dataclass(kw_only=True)
class EchoConfig:
    name: str = "echo"
    times: int = 2


def manager(**others: Any) -> pluggy.PluginManager:
    made = pluggy.PluginManager("decodekit")
    made.add_hookspecs(hookspecs)
    made.register(builtins, name="decodekit")
    for name, plugin in others.items():
        made.register(plugin, name=name)
    return made


def plugin(hook: str, answer: Any) -> SimpleNamespace:
    """Return a plugin whose one hook returns ``answer``, or raises it."""

    def implementation() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    implementation.__name__ = hook
    return SimpleNamespace(**{hook: hookimpl(implementation)})


def echo(config: EchoConfig, *parts: Any) -> EchoConfig:
    return config


ECHO = Component("echo", EchoConfig, echo)


# --- what comes with decodekit -------------------------------------------------------------------


def test_the_built_ins_come_through_the_hooks() -> None:
    found = build_registry(manager())
    assert {kind: found.names(kind) for kind in KINDS} == {
        "strategy": ("autoregressive", "draft_model", "jacobi", "lookahead", "prompt_lookup"),
        "pool": ("recent",),
        "backend": ("eager", "flash", "flex", "sdpa", "triton"),
        "adapter": ("hf",),
        "verifier": ("exact_match", "rejection"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_has_settings_that_say_its_name(kind: Any) -> None:
    found = build_registry(manager())
    for name in found.names(kind):
        component = found.get(kind, name)
        assert component.plugin == "decodekit"
        assert is_dataclass(component.config)
        assert component.config().name == name
        assert all(field.kw_only for field in fields(component.config))


def test_every_built_in_that_needs_no_model_can_be_built() -> None:
    found = build_registry(manager())
    made: list[tuple[str, dict[str, Any]]] = []

    class Parts:
        def new_pool(self, name: str, **sizes: Any) -> RecentNGramPool:
            made.append((name, sizes))
            return RecentNGramPool(**sizes)

    for name in set(found.names("strategy")) - {"draft_model"}:
        component = found.get("strategy", name)
        strategy: Strategy = component.build(component.config(), Parts())
        assert strategy.max_nodes >= 0
        assert strategy.new_proposer(SamplingParams()) is not None
    assert made
    assert all((name, set(sizes)) == ("recent", {"per_key", "max_keys"}) for name, sizes in made)
    for kind, interface in (
        ("backend", AttentionBackend),
        ("pool", NGramPool),
        ("verifier", Verifier),
    ):
        for name in found.names(kind):  # type: ignore[arg-type]
            component = found.get(kind, name)  # type: ignore[arg-type]
            assert isinstance(component.build(component.config()), interface)


def test_the_settings_of_the_pool_reach_it() -> None:
    component = build_registry(manager()).get("pool", "recent")
    pool = component.build(component.config(per_key=2, max_keys=3))
    assert (pool.per_key, pool.max_keys) == (2, 3)


# --- other plugins -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        ("strategy", "decodekit_register_strategies"),
        ("pool", "decodekit_register_pools"),
        ("backend", "decodekit_register_backends"),
        ("adapter", "decodekit_register_adapters"),
        ("verifier", "decodekit_register_verifiers"),
    ],
)
def test_a_plugin_can_bring_every_kind(kind: Any, hook: str) -> None:
    found = build_registry(manager(mine=plugin(hook, [ECHO])))
    assert found.get(kind, "echo").plugin == "mine"
    assert found.get(kind, "echo").build is ECHO.build


def test_a_plugin_that_takes_a_built_in_name_is_an_error_that_names_both() -> None:
    clash = Component("jacobi", EchoConfig, ECHO.build)
    with pytest.raises(PluginError) as caught:
        build_registry(manager(mine=plugin("decodekit_register_strategies", [clash])))
    assert str(caught.value) == (
        "plugins 'decodekit' and 'mine' both register the strategy 'jacobi'; uninstall one of them"
    )
    assert caught.value.plugins == ("decodekit", "mine")


def broken_generator() -> Iterator[Component]:
    yield ECHO
    raise RuntimeError("half way")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(RuntimeError("no luck"), "no luck", id="raises"),
        pytest.param(None, "", id="returns None"),
        pytest.param(["echo"], "", id="returns a name"),
        pytest.param([EchoConfig], "", id="returns a class"),
        pytest.param(broken_generator(), "half way", id="generates and raises"),
    ],
)
def test_a_plugin_that_breaks_is_named_with_its_hook(answer: Any, reason: str) -> None:
    with pytest.raises(PluginError) as caught:
        build_registry(manager(mine=plugin("decodekit_register_pools", answer)))
    message = str(caught.value)
    assert message.startswith("plugin 'mine' failed in decodekit_register_pools: ")
    assert reason in message
    assert caught.value.plugins == ("mine",)


# --- installed plugins ---------------------------------------------------------------------------


class Entry:
    """An installed entry point that loads to ``plugin``, or cannot be loaded."""

    def __init__(self, name: str, plugin: Any) -> None:
        self.name = name
        self.plugin = plugin

    def load(self) -> Any:
        if isinstance(self.plugin, Exception):
            raise self.plugin
        return self.plugin


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def installed(*entries: Entry) -> None:
        monkeypatch.setattr(
            plugins, "entry_points", lambda *, group: {ENTRY_POINT_GROUP: entries}[group]
        )
        plugins.registry.cache_clear()

    yield installed
    monkeypatch.undo()
    plugins.registry.cache_clear()


def test_an_installed_plugin_is_found(install: Any) -> None:
    install(Entry("mine", plugin("decodekit_register_strategies", [ECHO])))
    found = registry()
    assert isinstance(found, Registry)
    assert found.get("strategy", "echo").plugin == "mine"
    assert "lookahead" in found.names("strategy")
    assert registry() is found  # filled once in a process


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Entry("mine", ImportError("no module named x")), "no module named x"),
        (Entry("mine", plugin("decodekit_register_strategy", [ECHO])), "unknown hook"),
    ],
    ids=["import fails", "misspelt hook"],
)
def test_an_installed_plugin_that_cannot_be_loaded_is_an_error(
    install: Any, entry: Entry, reason: str
) -> None:
    install(entry)
    with pytest.raises(PluginError, match=r"plugin .mine.|unknown hook") as caught:
        registry()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass
class Nameless:
    """A config without a name."""


class NoDataclass:
    name = "echo"


@pytest.mark.parametrize("config", [Nameless, NoDataclass, JacobiConfig, 5])
def test_a_config_that_does_not_name_its_component_is_named(config: Any) -> None:
    broken = Component("echo", config, echo)
    with pytest.raises(PluginError, match="'mine': the config of the strategy 'echo' must be"):
        build_registry(manager(mine=plugin("decodekit_register_strategies", [broken])))
