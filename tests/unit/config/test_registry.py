"""Components by kind and name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from decodekit.config.plugins.registry import KINDS, Registry
from decodekit.errors import ConfigError, PluginError
from decodekit.interfaces.component import Component


@dataclass(kw_only=True)
class Settings:
    name: str = "mine"


def component(name: str) -> Component:
    return Component(name, Settings, Settings)


def filled() -> Registry:
    registry = Registry()
    registry.add("strategy", [component("lookahead"), component("jacobi")], plugin="decodekit")
    return registry


def test_a_component_is_found_under_its_name_with_its_plugin() -> None:
    found = filled().get("strategy", "jacobi")
    assert found == Component("jacobi", Settings, Settings, plugin="decodekit")


def test_names_are_sorted_and_kinds_are_apart() -> None:
    registry = filled()
    registry.add("pool", [component("jacobi")], plugin="other")
    assert registry.names("strategy") == ("jacobi", "lookahead")
    assert registry.names("pool") == ("jacobi",)
    assert registry.names("backend") == ()
    assert KINDS == ("strategy", "pool", "backend", "adapter", "verifier")


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("strategy", "lookahed", "unknown strategy 'lookahed': did you mean 'lookahead'?"),
        ("strategy", "xyz", "unknown strategy 'xyz': choose one of: jacobi, lookahead"),
        ("pool", "recent", "unknown pool 'recent': there are none"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_one(
    kind: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        filled().get(kind, name)  # type: ignore[arg-type]
    assert str(caught.value) == message
    assert (caught.value.key, caught.value.value) == (kind, name)
    assert caught.value.__cause__ is None


def test_two_plugins_with_one_name_are_an_error_that_names_both() -> None:
    registry = filled()
    with pytest.raises(PluginError) as caught:
        registry.add("strategy", [component("fresh"), component("jacobi")], plugin="other")
    assert str(caught.value) == (
        "plugins 'decodekit' and 'other' both register the strategy 'jacobi'; uninstall one of them"
    )
    assert caught.value.plugins == ("decodekit", "other")
    assert registry.get("strategy", "jacobi").plugin == "decodekit"
