"""The names that other libraries have for options: taken where they mean the same, else explained.

The libraries are ``transformers``, vLLM, llama.cpp, and the interface of OpenAI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from decodekit.errors import ConfigError
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["EXPLAINED", "RENAMED", "own_name", "own_names", "with_other_names"]

Kind = TypeVar("Kind", bound=type)

_SAMPLING = frozenset(one.name for one in fields(SamplingParams))

RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "stop_words": "stop",
    "stop_sequences": "stop",
    "temp": "temperature",
    "random_seed": "seed",
    "top_logprobs": "logprobs",
    "num_return_sequences": "n",
    "eos_token_ids": "eos_token_id",
}
"""Names of others that mean exactly what one of ours means."""

_BEAMS = "there is no beam search here: each token is the best one, or drawn; leave it out"
_ALWAYS = "a result always has its tokens, and logprobs=k adds log-probabilities; leave it out"
_GRAMMAR = 'write constraint={"regex": ...} or constraint={"json_schema": ...}'
_STRATEGY = "how tokens are guessed belongs to the decoder: Decoder.from_model(..., strategy=...)"
_FIRST = "the prompt is the first argument of generate and stream"
EXPLAINED = {
    "max_length": "it counts the prompt, too; max_new_tokens counts new tokens only",
    "min_length": "it counts the prompt, too; min_new_tokens counts new tokens only",
    "repeat_penalty": "it looks at the last tokens only; repetition_penalty looks at all of them",
    "repeat_last_n": "repetition_penalty looks at all tokens; leave it out",
    "logits_processors": "logits_processor takes one or a list, called with (input_ids [1, L], "
    "scores [1, V])",
    "bad_words_ids": "bad_words takes texts, and suppress_tokens single token ids",
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "use_beam_search": _BEAMS,
    "best_of": _BEAMS,
    "penalty_alpha": _BEAMS,
    "generation_config": "give its options one by one, or set model.generation_config, which is "
    "honoured",
    "max_time": "end a stream with cancel() when its time is up",
    "stream": "Decoder.stream streams",
    "return_dict_in_generate": _ALWAYS,
    "output_scores": _ALWAYS,
    "output_logits": _ALWAYS,
    "use_cache": "there is always a cache; leave it out",
    "pad_token_id": "nothing is padded here; leave it out",
    "guided_regex": _GRAMMAR,
    "guided_json": _GRAMMAR,
    "regex": _GRAMMAR,
    "json_schema": _GRAMMAR,
    "response_format": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    "grammar": _GRAMMAR,
    "assistant_model": _STRATEGY,
    "prompt_lookup_num_tokens": _STRATEGY,
    "messages": _FIRST,
    "inputs": _FIRST,
    "prompts": _FIRST,
}
"""Names of others that mean something else than ours, or nothing here, and what to write."""


def own_name(name: str, others: Iterable[str]) -> str:
    """Return our name of an option.

    Args:
        name: As it was given.
        others: All the names that were given.

    Raises:
        ConfigError: It means something else than ours, or both were given.
    """
    if name in EXPLAINED:
        raise ConfigError(f"unknown option {name!r}: {EXPLAINED[name]}", key=name)
    own = RENAMED.get(name, name)
    twins = sorted(other for other in set(others) if RENAMED.get(other, other) == own)
    if len(twins) > 1:
        raise ConfigError(f"{' and '.join(twins)} are one option; give one of them", key=own)
    return own


def own_names(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return options by our names; what is not known is left as it is.

    Args:
        given: Options, none of them None.
        known: Our names.

    Raises:
        ConfigError: As for ``own_name``, or ``do_sample`` and ``temperature`` contradict.
    """
    if not any(name in RENAMED or name in EXPLAINED or name == "do_sample" for name in given):
        return dict(given)
    named = {own_name(name, given): value for name, value in given.items()}
    if "do_sample" in named and "temperature" in known:
        _take_do_sample(named)
    return named


def _take_do_sample(named: dict[str, Any]) -> None:
    """Turn ``do_sample`` into a temperature, which says it here."""
    value = named.pop("do_sample")
    if value is False and not named.get("temperature"):
        named["temperature"] = 0.0
    elif value is not True or not named.get("temperature"):
        raise ConfigError(
            "temperature says whether tokens are drawn: 0 is do_sample=False, and do_sample=True "
            "needs one above 0",
            key="do_sample",
            value=value,
        )


def with_other_names(kind: Kind) -> Kind:
    """Let a dataclass be made with the names that others have for its fields."""
    made: Callable[..., None] = kind.__init__  # type: ignore[misc]  # of this very class
    known = frozenset(one.name for one in fields(kind))

    @wraps(made)
    def init(self: Any, *values: Any, **given: Any) -> None:
        named = own_names(given, known)
        for name in sorted(set(named) & _SAMPLING):
            raise ConfigError(
                f"{name} goes into sampling=SamplingParams({name}=...), or to generate by keyword",
                key=name,
            )
        made(self, *values, **named)

    kind.__init__ = init  # type: ignore[misc]
    return kind
