"""The exceptions of decodekit: one tree, each with its data and the fix in the message.

::

    DecodekitError
    ├── ConfigError (ValueError)        a setting is wrong: unknown name, mistyped key, bad value
    ├── ModelSupportError (ValueError)  a model cannot be decoded this way, and why
    ├── CheckpointError (OSError)       a model's files cannot be found, fetched or read
    ├── BackendError (RuntimeError)     an attention backend is missing or refuses an input
    ├── GenerationError (RuntimeError)  a request failed: empty prompt, too long, NaN logits
    │   └── TreeError (ValueError)      a token tree or a proposal is malformed
    ├── PluginError (RuntimeError)      a plugin is broken or clashes with another
    └── DependencyError (ImportError)   a package is of a version that does not work
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DecodekitError",
    "DependencyError",
    "GenerationError",
    "ModelSupportError",
    "NoStopIteration",
    "PluginError",
    "TreeError",
    "in_one_line",
    "nearest",
    "require_ascending",
    "require_at_least",
    "require_nodes",
    "require_true_or_false",
    "require_unicode",
    "shortened",
]


class DecodekitError(Exception):
    """Base of every error that decodekit raises on purpose; its text is one line."""


class ConfigError(DecodekitError, ValueError):
    """A setting is wrong.

    Attributes:
        key: The dotted name of the setting, for example ``strategy.window_size``.
        value: The value that was refused, or None if the key itself is unknown.
    """

    def __init__(self, message: str, *, key: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class ModelSupportError(DecodekitError, ValueError):
    """A model has something that the chosen adapter or backend cannot decode exactly.

    Attributes:
        reason: What it is, without the names of the model and the adapter.
    """

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message


class CheckpointError(DecodekitError, OSError):
    """A model's files are missing, incomplete, or cannot be fetched.

    Attributes:
        model: The model's name as the caller gave it.
    """

    def __init__(self, message: str, *, model: str | None = None) -> None:
        super().__init__(message)
        self.model = model


class BackendError(DecodekitError, RuntimeError):
    """An attention backend is not available, or an input is outside what it supports.

    Attributes:
        backend: The backend's registered name.
    """

    def __init__(self, message: str, *, backend: str | None = None) -> None:
        super().__init__(message)
        self.backend = backend


class GenerationError(DecodekitError, RuntimeError):
    """A request cannot be started or continued.

    Attributes:
        step: The index of the failed step, from 0, or None if no step was run.
        sequence: The index of the sequence that failed in its batch, or None if it is not one's.
        results: What the sequences of a batch had until then, one for each; else None. An exception
            of another kind that ends a batch, a processor's own or Ctrl-C, gets this attribute too.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.sequence: int | None = None
        self.results: list[Any] | None = None


class TreeError(GenerationError, ValueError):
    """A token tree is malformed, or a proposal is larger than its budget."""


class PluginError(DecodekitError, RuntimeError):
    """A plugin cannot be loaded, or two plugins claim one name.

    Attributes:
        plugins: The names of the plugins involved.
    """

    def __init__(self, message: str, *, plugins: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.plugins = plugins


class DependencyError(DecodekitError, ImportError):
    """A package that decodekit needs is of a version that it was not made for.

    Attributes:
        package: Its name, as pip knows it.
        found: The version that is installed.
    """

    def __init__(self, message: str, *, package: str = "", found: str = "") -> None:
        super().__init__(message)
        self.package = package
        self.found = found


class NoStopIteration:
    """Turns a StopIteration inside a ``with`` block into an error that names who raised it.

    Whatever iterates over a text would take it for the end of the text. (No ``contextmanager``:
    that takes a RuntimeError which comes from a StopIteration for one of its own, and drops it.)

    Args:
        what: Who is called inside the block, for example ``the streamer Printer``.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, (StopIteration, StopAsyncIteration)):
            raise GenerationError(
                f"{self._what} raised {type(error).__name__}, which would look like the end of the "
                "text; let it raise something else"
            ) from error


def in_one_line(error: object) -> str:
    """Return what an error, or a text, says in one line; an error's type if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def nearest(word: str, options: Iterable[str]) -> str:
    """Say which of ``options`` was probably meant by ``word``, as the end of an error message."""
    choices = sorted(options)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose one of: {', '.join(choices)}" if choices else "there are none"


def shortened(value: object) -> str:
    """Return ``value`` as it is shown in an error message: one line, and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_at_least(value: int, least: int, *, key: str) -> None:
    """Raise unless ``value`` is ``least`` or more.

    Args:
        value: The value of a setting.
        least: The smallest value that makes sense.
        key: The setting's dotted name; its last part is what the message calls it.

    Raises:
        ConfigError: It is smaller, or no whole number.
    """
    name = key.rpartition(".")[2]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, not {value!r}", key=key, value=value)
    if value < least:
        raise ConfigError(f"{name} must be {least} or more, not {value}", key=key, value=value)


def require_true_or_false(value: object, *, key: str) -> None:
    """Raise unless ``value`` is True or False; ``key`` is as in ``require_at_least``.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(value, bool):
        name = key.rpartition(".")[2]
        raise ConfigError(
            f"{name} must be true or false, not {shortened(value)}", key=key, value=value
        )


def require_unicode(text: str, *, key: str) -> None:
    """Raise unless ``text`` can be written as UTF-8; ``key`` is as in ``require_at_least``.

    Raises:
        ConfigError: It holds half of a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        name = key.rpartition(".")[2]
        message = f"{name} must be valid Unicode text, not {shortened(text)}"
        raise ConfigError(message, key=key, value=text) from error


def require_ascending(values: Sequence[int], *, key: str) -> None:
    """Raise unless ``values`` are whole numbers from 1 on, at least one, each above the last.

    Args:
        values: The value of a setting.
        key: The setting's dotted name; its last part is what the message calls it.

    Raises:
        ConfigError: They are not; the message shows how they could be written.
    """
    name = key.rpartition(".")[2]
    if not values:
        raise ConfigError(f"{name} must hold at least one number", key=key, value=values)
    for value in values:
        require_at_least(value, 1, key=key)
    if any(after <= before for before, after in pairwise(values)):
        ordered = ",".join(map(str, sorted(set(values))))
        raise ConfigError(f"{name} must ascend: {key}=[{ordered}]", key=key, value=values)


def require_nodes(nodes: int, settings: str) -> None:
    """Raise if a strategy's largest tree has more nodes than a forward pass can sensibly hold.

    Args:
        nodes: Nodes of the largest tree.
        settings: What makes it so large, for example ``window_size and ngram_size``; the first word
            is the key that is blamed.

    Raises:
        ConfigError: There are more than 4,096.
    """
    if nodes > 4096:
        raise ConfigError(
            f"{settings} make a tree of {nodes} nodes; at most 4096 are run in a pass",
            key=f"strategy.{settings.split()[0].rstrip(',')}",
        )
