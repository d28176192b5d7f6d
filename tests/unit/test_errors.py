"""The tree of errors, their data, and the hint at their end."""

from __future__ import annotations

import inspect

import pytest

from decodekit import errors
from decodekit.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DecodekitError,
    GenerationError,
    ModelSupportError,
    PluginError,
    TreeError,
    nearest,
    require_at_least,
)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (ModelSupportError, ValueError),
        (CheckpointError, OSError),
        (BackendError, RuntimeError),
        (GenerationError, RuntimeError),
        (TreeError, ValueError),
        (TreeError, GenerationError),
        (PluginError, RuntimeError),
    ],
)
def test_every_error_is_ours_and_what_a_caller_would_expect(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    error = kind("what is wrong")
    assert isinstance(error, DecodekitError)
    assert isinstance(error, builtin)
    assert str(error) == "what is wrong"


def test_the_docstring_draws_every_class() -> None:
    drawn = inspect.getdoc(errors) or ""
    for name in errors.__all__:
        if name.endswith("Error"):
            assert name in drawn


def test_errors_carry_their_data() -> None:
    config = ConfigError("no", key="seed", value=-1)
    assert (config.key, config.value) == ("seed", -1)
    assert ModelSupportError("X: y", reason="y").reason == "y"
    assert ModelSupportError("X: y").reason == "X: y"
    assert CheckpointError("no", model="m").model == "m"
    assert BackendError("no", backend="sdpa").backend == "sdpa"
    assert GenerationError("no", step=3).step == 3
    assert TreeError("no").step is None
    assert PluginError("no", plugins=("a", "b")).plugins == ("a", "b")


@pytest.mark.parametrize(
    ("word", "options", "hint"),
    [
        ("lookahed", ["jacobi", "lookahead"], "did you mean 'lookahead'?"),
        ("zzz", ["jacobi", "lookahead"], "choose one of: jacobi, lookahead"),
        ("zzz", ["b", "a"], "choose one of: a, b"),
        ("zzz", [], "there are none"),
        ("", ["a"], "choose one of: a"),
    ],
)
def test_the_nearest_option_is_named_or_all_are(word: str, options: list[str], hint: str) -> None:
    assert nearest(word, options) == hint
    assert nearest(word, iter(options)) == hint


def test_a_value_below_its_least_is_refused_by_name() -> None:
    require_at_least(3, 3, key="strategy.window_size")
    with pytest.raises(ConfigError) as caught:
        require_at_least(2, 3, key="strategy.window_size")
    assert str(caught.value) == "window_size must be 3 or more, not 2"
    assert (caught.value.key, caught.value.value) == ("strategy.window_size", 2)
