"""What a model's ``generation_config`` asks for, where neither decoder nor request say otherwise.

A checkpoint may bring along penalties, bans and filters (Qwen2.5-Instruct: a repetition penalty of
1.1 and three filters), which ``model.generate`` applies without being asked. So do we, under the
rule of docs/requests.md. Only what the configuration sets itself counts: ``generate`` fills in a
``top_k`` of 50 where it samples and nobody names another, and that is left out here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from decodekit.errors import ConfigError, shortened
from decodekit.interfaces.sampling_params import FILTERS, SamplingParams

__all__ = ["GenerationDefaults", "defaults_of"]

_FIELDS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "suppress_tokens",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
"""Settings that mean the same in ``SamplingParams``."""

_FURTHER = {
    # Those that only a model may ask for, and the option of a request that takes their place.
    "min_length": "min_new_tokens",
    "bad_words_ids": "bad_words",
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": None,
}

_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    # What would change an answer and is not done here, and when it is switched on.
    "num_beams": lambda value: value != 1,
    "guidance_scale": lambda value: value != 1,
    "encoder_repetition_penalty": lambda value: value != 1,
    "encoder_no_repeat_ngram_size": bool,
    "penalty_alpha": bool,
    "dola_layers": bool,
    "constraints": bool,
    "force_words_ids": bool,
    "token_healing": bool,
    "watermarking_config": bool,
    "stop_strings": bool,
    "max_time": bool,
    "top_h": bool,
}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What the ``generation_config`` of a model sets; all is empty where it sets nothing.

    Attributes:
        sampling: Fields of ``SamplingParams``, by name.
        further: What only a model may ask for, by the names of ``transformers``: ``min_length``,
            ``bad_words_ids``, ``sequence_bias``, ``forced_bos_token_id``, ``forced_eos_token_id``,
            ``exponential_decay_length_penalty`` and ``begin_suppress_tokens``.
        unsupported: Names of what is set and is not done.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()

    def without(self, options: Collection[str]) -> GenerationDefaults:
        """Return what is left where a caller gives some options, whatever their values."""
        return replace(
            self,
            sampling={name: one for name, one in self.sampling.items() if name not in options},
            further={
                name: one for name, one in self.further.items() if _FURTHER[name] not in options
            },
        )

    def under(self, params: SamplingParams) -> GenerationDefaults:
        """Return what is left beside settings of the caller: those not at their defaults win.

        Filters are left out under greedy decoding, where they have no effect.
        """
        plain = SamplingParams()
        given = {
            one.name
            for one in fields(SamplingParams)
            if getattr(params, one.name) != getattr(plain, one.name)
        }
        return self.without(given if params.temperature > 0 else given | FILTERS)

    def filled(self, params: SamplingParams) -> SamplingParams:
        """Return settings with what is here in the place of theirs.

        Raises:
            ConfigError: The model asks for a value that is out of its range.
        """
        try:
            return replace(params, **self.sampling)
        except ConfigError as error:
            error.args = (
                f"the model's generation_config: {error}; give another value, or set "
                "model.generation_defaults=false (generation_defaults=False of from_model)",
            )
            raise

    @property
    def values(self) -> dict[str, Any]:
        """All of it, by the names of ``transformers``."""
        return {**self.sampling, **self.further}

    def __str__(self) -> str:
        """Return it in words, for one line of a summary; empty where there is nothing."""
        if not self.values:
            return ""
        shown = ", ".join(f"{name}={shortened(value)}" for name, value in self.values.items())
        return f"generation_config: {shown}"


def defaults_of(model: Any, *, vocab_size: int) -> GenerationDefaults:
    """Return what the ``generation_config`` of a model asks for.

    Args:
        model: A ``transformers`` model; anything without a ``generation_config`` asks for nothing.
        vocab_size: V; ids of tokens that the model does not have are left out.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return GenerationDefaults()
    plain = SamplingParams()
    sampling = {
        name: value
        for name in _FIELDS
        if (value := _value_of(config, name)) not in (None, getattr(plain, name))
    }
    if "suppress_tokens" in sampling:
        kept = [token for token in sampling["suppress_tokens"] if 0 <= token < vocab_size]
        sampling["suppress_tokens"] = kept
    further = {
        name: value for name in _FURTHER if not _is_off(name, value := _value_of(config, name))
    }
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        forced = further.get(name)
        given = forced if isinstance(forced, (list, tuple)) else [forced]
        if name in further and all(isinstance(one, int) and one >= vocab_size for one in given):
            raise _unusable(name, forced, f"the model's last token is {vocab_size - 1}")
    if "min_new_tokens" in sampling:
        further.pop("min_length", None)  # as in transformers
    return GenerationDefaults(
        sampling=sampling,
        further=further,
        unsupported=tuple(
            name
            for name, is_on in _UNSUPPORTED.items()
            if (value := getattr(config, name, None)) is not None and is_on(value)
        ),
    )


_FORMS: dict[str, Callable[[Any], Any]] = {
    # The settings that are worked with here, and in what form.
    "suppress_tokens": lambda value: [operator.index(token) for token in value],
    "min_length": operator.index,
    "bad_words_ids": lambda value: [tuple(map(operator.index, run)) for run in value],
}


def _value_of(config: Any, name: str) -> Any:
    """Return a setting in the form that it is worked with.

    Raises:
        ConfigError: It has another one.
    """
    value = getattr(config, name, None)
    if value is None or name not in _FORMS:
        return value
    try:
        return _FORMS[name](value)
    except TypeError as error:
        raise _unusable(name, value, str(error)) from error


def _unusable(name: str, value: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"the model's generation_config: {name}={shortened(value)} cannot be used: {reason}; set "
        "model.generation_defaults=false (generation_defaults=False of from_model)",
        key="model.generation_defaults",
        value=value,
    )


def _is_off(name: str, value: Any) -> bool:
    return value in (None, [], {}) or (name == "min_length" and value == 0)
