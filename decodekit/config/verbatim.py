"""Settings whose text is taken as it is: prompts, stop strings and paths may hold any character."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from decodekit.config.schema import RunConfig
from decodekit.errors import ConfigError, nearest, shortened

__all__ = ["LITERAL", "is_path", "literal_of", "with_literals"]

LITERAL = (
    "prompt",
    "prompt_file",
    "stop",
    "model.path",
    "model.repo",
    "model.revision",
    "strategy.model",
    "bench.prompts",
    "bench.output",
    "bench.reference",
    "profile.output",
    "verify.prompts",
    "constraint.regex",
    "constraint.json_schema",
)
"""Keys whose text is taken as it is: a prompt or a path must not be read as Hydra's grammar."""


def literal_of(key: str, text: str) -> Any:
    """Return the value of an override ``KEY=TEXT`` whose text is taken as it is, else None.

    Only a stop in brackets with a comma or quotes in it, ``stop=[a,b]`` or ``stop=['a']``, is a
    list of texts, as YAML writes it; ``stop=[INST]`` is that text. ``null`` inside a group is no
    text but nothing.

    Raises:
        ConfigError: A list of stop strings cannot be read.
    """
    if key not in LITERAL or ("." in key and text == "null"):
        return None
    return _texts(text) if key == "stop" and _is_list(text) else text


def with_literals(config: RunConfig, literal: Mapping[str, Any]) -> RunConfig:
    """Return ``config`` with the texts that were kept from Hydra's grammar and interpolations.

    Raises:
        ConfigError: The settings of a group have no such key.
    """
    for key, value in literal.items():
        group, _, name = key.rpartition(".")
        if key == "stop" and isinstance(value, str):
            value = [value]
        if group:
            settings = getattr(config, group)
            known = [one.name for one in dataclasses.fields(settings)]
            if name not in known:
                raise ConfigError(
                    f"unknown key {name!r} in {group!r}: {nearest(name, known)}", key=key
                )
            value = dataclasses.replace(settings, **{name: value})
        config = dataclasses.replace(config, **{group or name: value})
    return config


def is_path(model: str) -> bool:
    """Return whether ``model=...`` gives a place or a hub name, not one of ``conf/model/``."""
    return "/" in model or "\\" in model or model in (".", "..") or model.endswith(".gguf")


def _is_list(stop: str) -> bool:
    """Return whether the text after ``stop=`` is meant as a list of several."""
    return stop == "[]" or (
        stop.startswith("[") and stop.endswith("]") and any(mark in stop for mark in ",'\"")
    )


def _texts(stop: str) -> list[str]:
    """Return the texts of a list in YAML."""
    try:
        texts = yaml.load(stop, yaml.BaseLoader)  # everything in it is text
    except yaml.YAMLError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f'cannot read the list stop={shortened(stop)}; write stop=["a","b"]', key="stop"
        )
    return texts
