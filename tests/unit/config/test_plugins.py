"""From hooks to the registry: built-ins, other plugins, and plugins that are broken."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from decodekit import Decoder, hookspecs
from decodekit.cli.main import main
from decodekit.config.compose import compose_config, compose_mapping, group_options
from decodekit.config.plugins import builtin as builtins
from decodekit.config.plugins.installed import (
    build_registry,
    installed,
    new_observers,
    registry,
    settings_files,
)
from decodekit.config.plugins.registry import KINDS, Registry
from decodekit.decoder import build as factory
from decodekit.errors import ConfigError, PluginError
from decodekit.hookspecs import API_VERSION, hookimpl
from decodekit.interfaces import AttentionBackend, NGramPool, Strategy, Verifier
from decodekit.interfaces.component import Component, ModelConfig
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.strategies.jacobi import JacobiConfig
from decodekit.strategies.lookahead.pool import RecentNGramPool
from decodekit.testing import ToyAdapter
from tests.support.entries import Entry, plugin


@dataclass(kw_only=True)
class EchoConfig:
    name: str = "echo"
    times: int = 2


def manager(**others: Any) -> pluggy.PluginManager:
    made = pluggy.PluginManager("decodekit")
    made.add_hookspecs(hookspecs)
    made.register(builtins, name="decodekit")
    for name, other in others.items():
        made.register(other, name=name)
    return made


def echo(config: EchoConfig, *parts: Any) -> EchoConfig:
    return config


ECHO = Component("echo", EchoConfig, echo)


# --- what comes with decodekit -------------------------------------------------------------------


def test_the_built_ins_come_through_the_hooks() -> None:
    found = build_registry(manager())
    assert {kind: found.names(kind) for kind in KINDS} == {
        "strategy": ("autoregressive", "draft_model", "jacobi", "lookahead", "prompt_lookup"),
        "pool": ("recent",),
        "backend": ("auto", "eager", "flash", "flex", "invariant", "sdpa", "triton"),
        "adapter": ("auto", "hf", "llama"),
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
    clash = Component("jacobi", JacobiConfig, ECHO.build)
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


def states() -> dict[str, str]:
    return {one.name: one.state for one in installed().plugins}


def test_an_installed_plugin_is_found(install: Any) -> None:
    install(Entry("mine", plugin("decodekit_register_strategies", [ECHO])))
    found = registry()
    assert isinstance(found, Registry)
    assert found.get("strategy", "echo").plugin == "mine"
    assert "lookahead" in found.names("strategy")
    assert registry() is found  # filled once in a process
    own, mine = installed().plugins
    assert own.name == own.distribution == "decodekit"
    assert (mine.distribution, mine.version, mine.state) == ("some-dist", "1.2", "on")
    assert mine.components == (("strategy", "echo"),)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (ImportError("no module named x"), "cannot be loaded: no module named x"),
        (SystemExit(3), "cannot be loaded: 3"),
        (AssertionError(), "cannot be loaded: AssertionError"),
        (
            plugin("decodekit_register_strategy", [ECHO]),
            "unknown hook 'decodekit_register_strategy': did you mean "
            "'decodekit_register_strategies'?",
        ),
        (plugin("decodekit_register_pools", [5]), "it must return Components"),
        (plugin("decodekit_config_package", 5), "it must return the name of a package"),
        (plugin("decodekit_config_package", "decodekit_nowhere"), "cannot be read: No module"),
        (plugin("decodekit_config_package", "decodekit.testing"), "has no file GROUP/NAME.yaml"),
    ],
    ids=["import", "exit", "wordless", "misspelt", "type", "package", "no package", "no files"],
)
def test_a_broken_plugin_stops_everything_but_the_list_and_is_named(
    install: Any, monkeypatch: pytest.MonkeyPatch, broken: Any, reason: str
) -> None:
    install(Entry("mine", broken), Entry("other", plugin("decodekit_register_pools", [ECHO])))
    for ask in (registry, settings_files, new_observers):
        with pytest.raises(PluginError) as caught:
            ask()
        assert str(caught.value).startswith("plugin 'mine'")
        assert reason in str(caught.value)
        assert "DECODEKIT_DISABLE_PLUGINS=mine switches this one off" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.plugins == ("mine",)
    assert states() == {"decodekit": "on", "mine": "broken", "other": "on"}
    monkeypatch.setenv("DECODEKIT_DISABLE_PLUGINS", "absent, mine")
    installed.cache_clear()
    assert registry().get("pool", "echo").plugin == "other"
    assert states() == {"decodekit": "on", "mine": "off", "other": "on"}


def test_two_plugins_with_one_component_are_both_named(install: Any) -> None:
    install(
        Entry("b", plugin("decodekit_register_pools", [ECHO])),
        Entry("a", plugin("decodekit_register_pools", [ECHO])),
    )
    with pytest.raises(PluginError, match="plugins 'a' and 'b' both register the pool 'echo'"):
        registry()
    assert states() == {"decodekit": "on", "a": "on", "b": "broken"}


@pytest.mark.parametrize("name", ["same", "decodekit"])
def test_two_distributions_with_one_plugin_name_are_both_named(install: Any, name: str) -> None:
    first = "decodekit" if name == "decodekit" else "first-dist"
    entries = [Entry(name, plugin("decodekit_register_pools", [ECHO]), dist="second-dist")]
    if name == "same":
        entries.insert(0, Entry(name, plugin("decodekit_register_pools", []), dist=first))
    install(*entries)
    with pytest.raises(PluginError, match=f"'{first}' and 'second-dist' both bring a plugin"):
        registry()


def test_a_plugin_with_one_name_twice_is_named_once(install: Any) -> None:
    install(Entry("mine", plugin("decodekit_register_pools", [ECHO, ECHO])))
    with pytest.raises(PluginError, match="plugin 'mine' registers the pool 'echo' twice"):
        registry()


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        (API_VERSION + 1, f"upgrade decodekit, which has version {API_VERSION}"),
        (API_VERSION - 1, f"upgrade some-dist to one for version {API_VERSION}"),
        ("1", "it must be a whole number"),
    ],
)
def test_a_plugin_for_another_version_is_named_with_what_to_upgrade(
    install: Any, version: Any, fix: str
) -> None:
    made = plugin("decodekit_register_pools", [ECHO])
    made.decodekit_api_version = API_VERSION
    install(Entry("mine", made))
    assert registry().names("pool") == ("echo", "recent")
    made.decodekit_api_version = version
    installed.cache_clear()
    with pytest.raises(PluginError) as caught:
        registry()
    expected = f"plugin 'mine' (some-dist 1.2) was written for version {version!r} of the plugin"
    assert str(caught.value).startswith(expected)
    assert fix in str(caught.value)


def test_a_wrapper_of_a_hook_is_refused(install: Any) -> None:
    @hookimpl(wrapper=True)
    def decodekit_register_pools() -> Any:
        yield

    install(Entry("mine", SimpleNamespace(decodekit_register_pools=decodekit_register_pools)))
    with pytest.raises(PluginError, match=r"'mine' .*: wrappers of hooks are not supported"):
        registry()


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


@pytest.mark.parametrize(
    ("kind", "broken", "reason"),
    [
        ("pools", Component("echo", EchoConfig, None), "has a build that cannot be called"),
        ("pools", Component("echo", EchoConfig, echo, load=echo), "only adapters have one"),
        ("adapters", Component("echo", EchoConfig, echo, load=5), "only adapters have one"),
    ],
    ids=["build", "load of a pool", "load"],
)
def test_a_component_that_cannot_be_called_is_named(kind: str, broken: Any, reason: str) -> None:
    with pytest.raises(PluginError, match=f"plugin 'mine': the .* 'echo' .*{reason}"):
        build_registry(manager(mine=plugin(f"decodekit_register_{kind}", [broken])))


# --- what a plugin builds ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["strategy", "backend", "adapter", "verifier", "pool"])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (5, "'echo' must be a .*; int lacks some of its methods"),
        (KeyError("lost"), "failed to make 'echo': KeyError: 'lost'"),
    ],
    ids=["type", "raises"],
)
def test_a_plugin_that_builds_something_else_is_named(
    install: Any, kind: Any, answer: Any, reason: str
) -> None:
    def build(*given: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    @dataclass(kw_only=True)
    class Config(EchoConfig):
        per_key: int = 1
        max_keys: int = 1

    hook = {"strategy": "strategies"}.get(kind, f"{kind}s")
    component = Component("echo", Config, build)
    install(Entry("mine", plugin(f"decodekit_register_{hook}", [component])))
    make: dict[str, Any] = {
        "strategy": lambda: factory.build_strategy("echo"),
        "backend": lambda: factory.build_adapter(None, backend="echo"),
        "adapter": lambda: factory.build_adapter(None, adapter="echo"),
        "verifier": lambda: factory.build_verifier("echo"),
        "pool": lambda: factory.build_strategy({"name": "lookahead", "pool": "echo"}).new_proposer(
            SamplingParams()
        ),
    }
    with pytest.raises(PluginError, match=f"plugin 'mine'.* {reason}"):
        make[kind]()


# --- observers -----------------------------------------------------------------------------------


def test_an_observer_may_leave_out_the_event_but_not_want_more(install: Any) -> None:
    calls: list[Any] = []

    @hookimpl
    def decodekit_step_finished() -> None:
        calls.append("none")

    install(Entry("mine", SimpleNamespace(decodekit_step_finished=decodekit_step_finished)))
    (observer,) = installed().observers
    event: Any = object()
    observer.notify(event)
    assert calls == ["none"]

    @hookimpl
    def wants_more(event: Any, colour: str) -> None:
        calls.append(event)

    wants_more.__name__ = "decodekit_step_finished"
    install(Entry("mine", SimpleNamespace(decodekit_step_finished=wants_more)))
    with pytest.raises(PluginError, match=r"plugin 'mine': .*'colour'"):
        new_observers()


# --- settings files and adapters that load -------------------------------------------------------


@dataclass(kw_only=True)
class OwnConfig:
    name: str = "own"
    greeting: str = "hello"


class Brought:
    """A plugin with an adapter that loads its models, and settings files in a package."""

    def __init__(self, loaded: Any = ("the model", "the tokenizer")) -> None:
        self.loaded = loaded
        self.asked: list[Any] = []

    @hookimpl
    def decodekit_register_adapters(self) -> list[Component]:
        return [Component("own", OwnConfig, echo, load=self.load)]

    @hookimpl
    def decodekit_config_package(self) -> str:
        return "brought_conf"

    def load(self, *given: Any, **more: Any) -> Any:
        self.asked.append((given, more))
        return self.loaded


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the package ``brought_conf``, with one model in it."""
    directory = tmp_path / "brought_conf"
    (directory / "model").mkdir(parents=True)
    (directory / "__init__.py").touch()
    (directory / "model" / "tiny-own.yaml").write_text(
        "defaults: [/schema/model@_here_, _self_]\nname: tiny-own\nadapter: own\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "brought_conf", raising=False)
    return directory


def test_a_model_of_a_plugin_brings_its_adapter_along(install: Any, conf: Path) -> None:
    brought = Brought()
    install(Entry("mine", brought))
    assert "tiny-own" in group_options("model")
    config = compose_config(["model=tiny-own", "adapter.greeting=hi", "dtype=float64"])
    assert config.adapter == OwnConfig(greeting="hi")
    assert config.model.name == "tiny-own"
    assert factory.load(config) == ("the model", "the tokenizer")
    assert brought.asked == [
        ((config.adapter, config.model), {"dtype": "float64", "device": "auto"})
    ]
    assert compose_mapping({"model": "tiny-own"}).adapter == OwnConfig()
    assert compose_config(["model=llama2-7b"]).adapter.name == "auto"
    with pytest.raises(ConfigError, match="model 'tiny-own' needs adapter=own, not hf"):
        factory.load(compose_config(["model=tiny-own", "adapter=hf"]))


def test_a_loader_that_returns_something_else_is_named(install: Any, conf: Path) -> None:
    for loaded in ("the model", ("a", "b", "c"), None):
        install(Entry("mine", Brought(loaded)))
        with pytest.raises(PluginError, match="plugin 'mine': load of the adapter 'own' must"):
            factory.load(compose_config(["model=tiny-own"]))


def test_a_file_of_a_component_is_its_settings(install: Any, conf: Path) -> None:
    (conf / "adapter").mkdir()
    for name, greeting in (("own", "servus"), ("own-loud", "SERVUS")):
        (conf / "adapter" / f"{name}.yaml").write_text(
            f"defaults: [/schema/adapter/own@_here_, _self_]\ngreeting: {greeting}\n"
        )
    install(Entry("mine", Brought()))
    assert compose_config(["adapter=own"]).adapter == OwnConfig(greeting="servus")
    assert compose_config(["adapter=own-loud"]).adapter == OwnConfig(greeting="SERVUS")
    with pytest.raises(ConfigError, match="unknown key 'greting' in 'adapter'"):
        compose_config(["adapter=own", "adapter.greting=x"])


def test_a_file_needs_no_words_about_its_schema(install: Any, conf: Path) -> None:
    (conf / "model" / "short.yaml").write_text("adapter: own\npath: /somewhere\n")
    (conf / "adapter").mkdir()
    (conf / "adapter" / "own-loud.yaml").write_text("name: own\ngreeting: HELLO\n")
    install(Entry("mine", Brought()))
    assert compose_config(["model=short"]).model == ModelConfig(
        name="short", path="/somewhere", adapter="own"
    )
    assert compose_config(["model=short"]).adapter == OwnConfig()
    assert compose_config(["adapter=own-loud"]).adapter == OwnConfig(greeting="HELLO")


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("modle/x.yaml", "name: x", "'modle', which is no group of settings"),
        ("model/x.yaml", "a: [", "model/x.yaml is no YAML"),
        ("model/x.yaml", "just text", "model/x.yaml must hold key: value"),
        ("model/llama2-7b.yaml", "name: llama2-7b", "a settings file of decodekit itself"),
    ],
)
def test_a_settings_file_that_cannot_be_used_is_named(
    install: Any, conf: Path, file: str, text: str, reason: str
) -> None:
    (conf / file).parent.mkdir(exist_ok=True)
    (conf / file).write_text(text)
    install(Entry("mine", Brought()))
    with pytest.raises(PluginError, match=f"plugin 'mine'.*{reason}") as caught:
        group_options("model")
    assert "\n" not in str(caught.value)


def test_two_plugins_with_one_settings_file_are_both_named(install: Any, conf: Path) -> None:
    other = plugin("decodekit_config_package", "brought_conf")
    install(Entry("mine", Brought()), Entry("other", other))
    with pytest.raises(PluginError, match=r"'mine' and 'other' both bring .* model/tiny-own"):
        registry()


# --- the list ------------------------------------------------------------------------------------


def test_the_list_has_what_works_what_is_off_and_what_is_broken(
    install: Any, conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DECODEKIT_DISABLE_PLUGINS", "idle")
    install(
        Entry("mine", Brought(), dist="mine-dist"),
        Entry("watch", plugin("decodekit_step_finished", None)),
        Entry("idle", ImportError("never seen")),
        Entry("wrong", ImportError("no module named x"), dist="wrong-dist"),
    )
    assert main(["plugins"]) == 1
    out = capsys.readouterr().out
    for kind, name, origin in (
        ("strategy", "lookahead", "decodekit decodekit 0.1.0"),
        ("adapter", "own", "mine mine-dist 1.2"),
        ("model", "tiny-own", "mine mine-dist 1.2"),
        ("observer", "watch", "watch some-dist 1.2"),
    ):
        assert f"{kind} {name} {origin}" in re.sub(r"[ |]+", " ", out)
    assert "switched off by DECODEKIT_DISABLE_PLUGINS: idle\n" in out
    assert "  wrong (wrong-dist 1.2): plugin 'wrong' cannot be loaded: no module named x" in out
    assert main(["plugins", "format=json"]) == 1
    listed = json.loads(capsys.readouterr().out)
    assert listed["api_version"] == API_VERSION
    by_name = {one["name"]: one for one in listed["plugins"]}
    assert list(by_name) == ["decodekit", "idle", "mine", "watch", "wrong"]
    assert by_name["mine"] == {
        "name": "mine",
        "distribution": "mine-dist",
        "version": "1.2",
        "state": "on",
        "error": None,
        "components": [{"kind": "adapter", "name": "own"}],
        "settings": [{"group": "model", "name": "tiny-own"}],
        "observes": False,
    }
    assert (by_name["watch"]["observes"], by_name["wrong"]["state"]) == (True, "broken")
    monkeypatch.setenv("DECODEKIT_DISABLE_PLUGINS", "idle,wrong")
    installed.cache_clear()
    assert main(["plugins"]) == 0
    assert "BROKEN" not in capsys.readouterr().out
    assert main(["plugins", "fromat=json"]) == 2
    assert "takes format=text or format=json, not fromat=json" in capsys.readouterr().err


def test_an_installed_observer_is_told_of_a_text(install: Any) -> None:
    events: list[Any] = []

    @hookimpl
    def decodekit_step_finished(event: Any) -> None:
        events.append(event)

    install(Entry("mine", SimpleNamespace(decodekit_step_finished=decodekit_step_finished)))
    decoder = Decoder(ToyAdapter(), strategy=factory.build_strategy("jacobi"))
    tokens = decoder.generate([1, 2, 3], max_new_tokens=9).tokens
    assert [token for event in events for token in event.tokens] == tokens
    install()
    events.clear()
    assert decoder.generate([1, 2, 3], max_new_tokens=9).tokens == tokens
    assert events == []
