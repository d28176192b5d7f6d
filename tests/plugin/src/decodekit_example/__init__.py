"""A decodekit plugin: its hooks. What takes long to import is imported when it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decodekit import Component, hookimpl
from decodekit.errors import require_at_least

__all__ = ["BytesConfig", "MergedConfig", "WordsConfig"]

decodekit_api_version = 1


@dataclass(kw_only=True)
class BytesConfig:
    """Settings of ``adapter=example-bytes``: there are none."""

    name: str = "example-bytes"


@dataclass(kw_only=True)
class MergedConfig:
    """Settings of ``backend=merged``: there are none."""

    name: str = "merged"


@dataclass(kw_only=True)
class WordsConfig:
    """Settings of ``strategy=words``.

    Attributes:
        num_tokens: Most guessed tokens of a step.
        min_letters: Letters of a word that must be there before the rest is guessed.
    """

    name: str = "words"
    num_tokens: int = 8
    min_letters: int = 1

    def __post_init__(self) -> None:
        require_at_least(self.num_tokens, 1, key="strategy.num_tokens")
        require_at_least(self.min_letters, 1, key="strategy.min_letters")


def _load(config: BytesConfig, model: Any, *, dtype: str, device: str) -> Any:
    from decodekit_example.loading import load

    return load(model.path, dtype=dtype, device=device)


def _adapter(config: BytesConfig, model: Any, backend: Any) -> Any:
    from decodekit_example.adapter import ByteAdapter

    return ByteAdapter(model, backend)


def _merged(config: MergedConfig) -> Any:
    from decodekit_example.backend import MergedBackend

    return MergedBackend()


def _words(config: WordsConfig, parts: Any) -> Any:
    from decodekit_example.strategy import Words

    return Words(config)


@hookimpl
def decodekit_register_adapters() -> list[Component]:
    """Return the adapter, which loads its models itself."""
    return [Component("example-bytes", BytesConfig, _adapter, load=_load)]


@hookimpl
def decodekit_register_backends() -> list[Component]:
    """Return the attention backend."""
    return [Component("merged", MergedConfig, _merged)]


@hookimpl
def decodekit_register_strategies() -> list[Component]:
    """Return the strategy."""
    return [Component("words", WordsConfig, _words)]


@hookimpl
def decodekit_config_package() -> str:
    """Return where the settings files are."""
    return "decodekit_example.conf"
