"""A plugin that is wrong is one line that names it, its mistake and the fix, and no traceback."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from decodekit.cli.main import main
from decodekit.config.compose import compose_config, compose_mapping, to_yaml
from decodekit.config.plugins.installed import installed, registry
from decodekit.decoder import build as factory
from decodekit.errors import ConfigError, PluginError
from decodekit.hookspecs import hookimpl
from decodekit.interfaces import Proposal
from decodekit.interfaces.component import Component
from tests.support.entries import Entry, plugin


@dataclass(kw_only=True)
class EchoConfig:
    name: str = "echo"
    times: int = 2


class Echo:
    """A strategy that guesses nothing."""

    max_nodes = 0

    def __init__(self, config: Any, parts: Any) -> None:
        self.config = config

    def new_proposer(self, params: Any) -> Echo:
        return self

    def propose(self, committed: Any, budget: Any) -> Proposal:
        return Proposal()

    def observe(self, outcome: Any) -> None:
        return None


def strategy(config: Any = EchoConfig, name: Any = "echo") -> SimpleNamespace:
    return plugin("decodekit_register_strategies", [Component(name, config, Echo)])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """Return the one line that the command line ends with."""
    assert main([*arguments, "--cfg"]) == code
    error = capsys.readouterr().err
    assert error.startswith("decodekit: ")
    assert error.count("\n") == 1
    return error


# --- the plugin itself ---------------------------------------------------------------------------


class RaisingVersion:
    @property
    def decodekit_api_version(self) -> int:
        raise RuntimeError("no version today")


class AsAClass:
    @hookimpl
    def decodekit_register_strategies(self) -> list[Component]:
        return []


async def decodekit_step_finished(event: Any) -> None:
    """An observer that nobody awaits."""


UNMARKED = SimpleNamespace(decodekit_register_pools=list)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (ImportError("gone"), "cannot be loaded: gone; uninstall or repair some-dist"),
        (RaisingVersion(), "cannot be loaded: no version today"),
        (plugin("decodekit_register_pools", SystemExit(3)), "decodekit_register_pools: 3"),
        (plugin("decodekit_config_package", SystemExit(3)), "decodekit_config_package: 3"),
        (plugin("decodekit_register_pools", None), "it must return Components, a list of them"),
        (plugin("decodekit_register_pools", {}), "a list of them, not {}"),
        (SimpleNamespace(), "it has no hook; its entry point must name the module"),
        (UNMARKED, "decodekit_register_pools is not marked; write @decodekit.hookimpl above"),
        (AsAClass, "it is a class; its entry point must name a module or an object"),
        (
            SimpleNamespace(decodekit_step_finished=hookimpl(decodekit_step_finished)),
            "must be a plain function, not async",
        ),
    ],
    ids=[
        "import",
        "version",
        "exit",
        "exit of conf",
        "none",
        "mapping",
        "no hook",
        "unmarked",
        "class",
        "async",
    ],
)
def test_what_is_wrong_with_a_plugin_is_said(
    install: Any, capsys: pytest.CaptureFixture[str], broken: Any, reason: str
) -> None:
    install(Entry("my plugin", broken))
    error = refusal(capsys)
    assert "plugin 'my plugin'" in error
    assert reason in error
    assert "DECODEKIT_DISABLE_PLUGINS='my plugin' switches" in error
    assert main(["plugins"]) == 1


def test_one_object_under_two_names_is_said(install: Any) -> None:
    same = strategy()
    install(Entry("a", same), Entry("b", same))
    with pytest.raises(PluginError, match="'b': it is the same object as the plugin 'a'; keep one"):
        registry()


def test_damaged_entry_points_are_one_line(
    monkeypatch: pytest.MonkeyPatch, install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(*, group: str) -> Any:
        raise TypeError("Pair.__new__() missing 1 argument")

    install()
    monkeypatch.setattr("decodekit.config.plugins.installed.entry_points", damaged)
    assert "look for a damaged entry_points.txt" in refusal(capsys)


@pytest.mark.parametrize("name", ["a,b", " x ", "my plugin", "\u00fc/x"])
def test_a_plugin_of_any_name_can_be_switched_off(
    install: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("DECODEKIT_DISABLE_PLUGINS", name)
    install(Entry(name, RuntimeError("never seen")))
    assert installed().plugins[1].state == "off"


def test_a_name_to_switch_off_that_is_not_there_is_listed(
    install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DECODEKIT_DISABLE_PLUGINS", "echo,ecko")
    install(Entry("echo", strategy()))
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "switched off by DECODEKIT_DISABLE_PLUGINS: echo\n" in out
    assert "in DECODEKIT_DISABLE_PLUGINS, but not installed: ecko\n" in out


# --- names and settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "my name",
        "a/b",
        "é",
        "a=b",
        "a,b",
        "null",
        "True",
        "nan",
        "123",
        "x.yaml",
        "${x}",
        "../x",
        "-x",
        "a\nb",
        5,
        None,
    ],
)
def test_a_name_that_could_not_be_chosen_is_refused(install: Any, name: Any) -> None:
    config = make_dataclass("Config", [("name", str, field(default=name))], kw_only=True)
    install(Entry("mine", strategy(config, name)))
    with pytest.raises(PluginError, match=r"'mine': .* cannot be the name of a strategy") as caught:
        registry()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Upper", "a.b", "my-name_2"])
def test_a_name_that_can_be_chosen_is_taken(install: Any, name: str) -> None:
    config = make_dataclass("Config", [("name", str, field(default=name))], kw_only=True)
    install(Entry("mine", strategy(config, name)))
    assert compose_config([f"strategy={name}"]).strategy.name == name


@dataclass(frozen=True, kw_only=True)
class Frozen:
    name: str = "echo"


@dataclass(kw_only=True)
class Fixed:
    name: str = "echo"
    cache: int = field(default=1, init=False)


@dataclass(kw_only=True)
class Defaults:
    name: str = "echo"
    defaults: int = 1


@dataclass(kw_only=True)
class Unsupported:
    name: str = "echo"
    mode: Literal["a", "b"] = "a"


@dataclass(kw_only=True)
class Unresolved:
    name: str = "echo"
    other: Nowhere = 1  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Frozen, "must not be frozen"),
        (Fixed, "has a field 'cache' with init=False; leave it out"),
        (Defaults, "has a field 'defaults', which Hydra reads; rename it"),
        (Unsupported, "cannot be a Hydra schema: mode: Unexpected type annotation"),
        (Unresolved, "cannot be a Hydra schema: name 'Nowhere' is not defined"),
    ],
)
def test_settings_that_hydra_cannot_take_name_the_plugin(
    install: Any, capsys: pytest.CaptureFixture[str], config: Any, reason: str
) -> None:
    install(Entry("mine", strategy(config)))
    error = refusal(capsys)
    assert f"plugin 'mine': the config of the strategy 'echo' {reason}" in error
    assert "DECODEKIT_DISABLE_PLUGINS=mine" in error


@dataclass(kw_only=True)
class Required:
    name: str = "echo"
    times: int


def test_a_setting_without_a_default_must_be_given(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install(Entry("mine", strategy(Required)))
    error = refusal(capsys, "strategy=echo", code=2)
    assert "strategy.times needs a value: strategy.times=VALUE" in error
    with pytest.raises(ConfigError, match=r"'echo' needs a value for 'times': strategy\.times"):
        factory.build_strategy("echo")
    assert compose_config(["strategy=echo", "strategy.times=4"]).strategy == Required(times=4)
    built: Any = factory.build_strategy({"name": "echo", "times": 4})
    assert built.config == Required(times=4)


@dataclass(kw_only=True)
class Checked:
    name: str = "echo"
    times: int = 1

    def __post_init__(self) -> None:
        if self.times == 7:
            raise KeyError("seven")
        if self.times < 1:
            raise ValueError("times must be 1\nor more")


def test_an_error_of_the_settings_themselves_is_one_line(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install(Entry("mine", strategy(Checked)))
    error = refusal(capsys, "strategy=echo", "strategy.times=0", code=2)
    assert error == "decodekit: strategy 'echo': times must be 1 or more\n"
    error = refusal(capsys, "strategy=echo", "strategy.times=7")
    assert error.startswith("decodekit: plugin 'mine': the settings of the strategy 'echo' fail")
    with pytest.raises(ConfigError, match="strategy 'echo': times must be 1 or more"):
        factory.build_strategy({"name": "echo", "times": 0})


@dataclass(kw_only=True)
class Broken:
    name: str = "echo"

    def __post_init__(self) -> None:
        raise KeyError("seven")


def test_a_plugin_whose_defaults_fail_is_listed_as_broken(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install(Entry("mine", strategy(Broken)))
    error = refusal(capsys)
    assert "plugin 'mine': the settings of the strategy 'echo' fail: KeyError: " in error
    assert "DECODEKIT_DISABLE_PLUGINS=mine switches" in error
    assert main(["plugins"]) == 1


class Colour(Enum):
    RED = 1


@dataclass(kw_only=True)
class Rich:
    name: str = "echo"
    where: Path = Path("here")
    colour: Colour = Colour.RED


def test_paths_and_enumerations_can_be_printed(install: Any) -> None:
    install(Entry("mine", strategy(Rich)))
    config = compose_config(["strategy=echo", "strategy.where=/there"])
    assert config.strategy == Rich(where=Path("/there"))
    assert "  where: /there\n  colour: RED\n" in to_yaml(config)


def test_a_literal_key_that_the_strategy_does_not_have_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refusal(capsys, "strategy=lookahead", "strategy.model=x", code=2)
    assert error.startswith("decodekit: unknown key 'model' in 'strategy': ")


# --- settings files ------------------------------------------------------------------------------


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Path:
    """Return the directory of a package of settings; its name is in ``conf_name``."""
    name = "conf_of_" + "".join(one if one.isalnum() else "_" for one in request.node.name)
    directory = tmp_path / name
    directory.mkdir()
    (directory / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return directory


def with_files(directory: Path, *, components: Any = ()) -> Any:
    @hookimpl
    def decodekit_config_package() -> str:
        return directory.name

    @hookimpl
    def decodekit_register_strategies() -> list[Component]:
        return list(components)

    return SimpleNamespace(
        decodekit_config_package=decodekit_config_package,
        decodekit_register_strategies=decodekit_register_strategies,
    )


ECHO = Component("echo", EchoConfig, Echo)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("model/a.yaml", "adaptor: x", "unknown key 'adaptor' in model/a.yaml: did you mean 'ad"),
        ("model/a.yaml", "adapter: hg", "model/a.yaml needs an unknown adapter 'hg': did you mean"),
        ("model/a.yaml", "_target_: os.system", "unknown key '_target_' in model/a.yaml"),
        ("strategy/a.yaml", "name: ecko", "is for an unknown strategy 'ecko'; write name: NAME"),
        ("strategy/a.yaml", "times: 3", "is for an unknown strategy 'a'; write name: NAME"),
        ("strategy/a.yaml", "defaults: []\nname: echo\nx: 1", "unknown key 'x' in strategy/a.yaml"),
        (
            "strategy/a.yaml",
            "defaults: x\nname: echo",
            "defaults of strategy/a.yaml must be a list",
        ),
        ("strategy/a.yaml", "name: echo\n1: 2", "unknown key 1 in strategy/a.yaml"),
        ("strategy/a.yaml", "name: echo\ntimes: 2020-01-01", "a.yaml cannot be used: times: "),
        ("strategy/a.yaml", "name: echo\ntimes: ${", "strategy/a.yaml cannot be used: times: "),
        ("strategy/a.yml", "name: echo", "strategy/a.yml must be called NAME.yaml"),
        ("strategy/a b.yaml", "name: echo", "strategy/a b.yaml must be called NAME.yaml"),
        ("strategy/123.yaml", "name: echo", "strategy/123.yaml must be called NAME.yaml"),
        ("strategy/echo.yaml", "name: jacobi", "must be for the strategy 'echo', not for 'jacobi'"),
        ("sampling/a.yaml", "temprature: 1", "unknown key 'temprature' in sampling/a.yaml: did"),
        ("__init__.py", "raise RuntimeError('boo')", "cannot be read: boo"),
        ("__init__.py", "raise SystemExit", "cannot be read: SystemExit"),
    ],
)
def test_a_settings_file_that_fits_nothing_is_named(
    install: Any,
    brought: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    text: str,
    reason: str,
) -> None:
    (brought / file).parent.mkdir(exist_ok=True)
    (brought / file).write_text(text)
    install(Entry("mine", with_files(brought, components=[ECHO])))
    error = refusal(capsys)
    assert "plugin 'mine': " in error
    assert reason in error
    assert "DECODEKIT_DISABLE_PLUGINS=mine" in error


def test_a_value_of_a_settings_file_is_checked_when_it_is_chosen(
    install: Any, brought: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (brought / "strategy").mkdir()
    (brought / "strategy" / "a.yaml").write_text("name: echo\ntimes: many")
    (brought / "strategy" / "b.yaml").write_text("defaults: []\nname: echo\ntimes: many")
    install(Entry("mine", with_files(brought, components=[ECHO])))
    for name in ("a", "b"):
        error = refusal(capsys, f"strategy={name}", code=2)
        assert f"plugin 'mine': In 'strategy/{name}'" in error
        assert "'many'" in error
    assert compose_config(["strategy=echo"]).strategy == EchoConfig()


def test_a_settings_file_may_build_on_another(install: Any, brought: Path) -> None:
    (brought / "strategy").mkdir()
    (brought / "strategy" / "loud.yaml").write_text("name: echo\ntimes: 5")
    (brought / "strategy" / "louder.yaml").write_text("defaults: [loud, _self_]\ntimes: 9")
    install(Entry("mine", with_files(brought, components=[ECHO])))
    assert compose_config(["strategy=louder"]).strategy == EchoConfig(times=9)


@pytest.mark.parametrize(
    ("name", "owner"), [("echo", "another plugin"), ("jacobi", "decodekit itself")]
)
def test_a_settings_file_cannot_hide_the_component_of(
    install: Any, brought: Path, name: str, owner: str
) -> None:
    (brought / "strategy").mkdir()
    (brought / "strategy" / f"{name}.yaml").write_text("{}")
    install(Entry("a", with_files(brought)), Entry("b", strategy()))
    reason = f"'a': strategy/{name}.yaml hides the strategy '{name}' of {owner}"
    with pytest.raises(PluginError, match=reason):
        registry()


# --- threads -------------------------------------------------------------------------------------


def test_threads_can_compose_settings_at_the_same_time() -> None:
    found: dict[int, int] = {}

    def compose(size: int) -> None:
        settings = {"strategy": {"name": "lookahead", "window_size": size}}
        found[size] = compose_mapping(settings).strategy.window_size

    threads = [threading.Thread(target=compose, args=(size,)) for size in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2: 2, 3: 3, 4: 4, 5: 5}
