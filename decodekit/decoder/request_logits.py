"""What changes the logits of one request: from its options to a ``Shaper``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from decodekit.decoder.bad_words import ban_words
from decodekit.decoder.callables import adopt_processors
from decodekit.decoder.dry_breakers import breaker_tokens
from decodekit.decoder.generation_defaults import GenerationDefaults
from decodekit.decoder.grammar import json_schema_constraint, regex_constraint
from decodekit.decoder.model_processors import banned_ids_of, model_processors_of
from decodekit.engine.processors import processors_of
from decodekit.engine.shaping import Shaper
from decodekit.errors import ConfigError, GenerationError, shortened
from decodekit.interfaces.adapter import ModelAdapter
from decodekit.interfaces.logits import Constraint, LogitsProcessor
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["Place", "shaper_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an answer stands and how it ends, as far as changes to its logits have to know.

    Attributes:
        prompt_length: Tokens of the prompt.
        max_new_tokens: Most new tokens.
        fresh: Whether the answer is a text of its own and does not continue the prompt's.
        at_start: Whether the tokenizer drops a space that the answer would begin with.
        eos: The end-of-text tokens.
        ends: All tokens that end the text by themselves.
        in_order: Whether the verifier asks for rows in order; see ``Verifier``.
    """

    prompt_length: int
    max_new_tokens: int
    fresh: bool
    at_start: bool
    eos: Set[int]
    ends: Set[int]
    in_order: bool


def shaper_of(
    params: SamplingParams,
    adapter: ModelAdapter,
    tokenizer: Any,
    *,
    place: Place,
    defaults: GenerationDefaults,
    logits_processor: Any = None,
    constraint: Any = None,
) -> Shaper | None:
    """Return what changes the logits; None if nothing does, which saves a copy of each row.

    Args:
        params: The penalties, bans and biases.
        adapter: The model.
        tokenizer: Its tokenizer, or None.
        place: Where the answer stands.
        defaults: What the model asks for beside ``params``.
        logits_processor: As in ``Request``.
        constraint: Likewise.

    Raises:
        ConfigError: An option is out of its range or cannot work here.
        GenerationError: An option is on text, and there is no tokenizer.
    """
    eos = sorted(place.eos)
    asked = model_processors_of(
        defaults,
        prompt_length=place.prompt_length,
        max_new_tokens=place.max_new_tokens,
        end_ids=eos,
    )
    processors = [*asked.first]
    words, least = banned_ids_of(defaults, end_ids=eos), defaults.further.get("min_length", 0)
    if least > place.prompt_length:
        params = replace(params, min_new_tokens=least - place.prompt_length)
    if params.changes_logits or words:
        _check_ids(params, adapter)
        processors += processors_of(
            params,
            prompt_length=place.prompt_length,
            end_ids=sorted(place.ends),
            bad_words=() if params.bad_words else words,
            banned_texts=_bans(
                params.bad_words,
                tokenizer,
                adapter,
                start=place.prompt_length if place.fresh else 0,
            ),
            breakers=_breakers(params, tokenizer),
            forced=asked.forced,
        )
    else:
        processors += asked.forced
    processors += asked.last
    processors += adopt_processors(logits_processor, in_order=place.in_order)
    grammar = _constraint(constraint, adapter, tokenizer, eos=place.eos, fresh=place.at_start)
    if not processors and grammar is None:
        return None
    return Shaper(processors, grammar, branches=not place.in_order)


def _check_ids(params: SamplingParams, adapter: ModelAdapter) -> None:
    for name in ("logit_bias", "suppress_tokens"):
        high = max(getattr(params, name), default=0)
        if high >= adapter.vocab_size:
            raise ConfigError(
                f"{name} names token {high}; the model's last is {adapter.vocab_size - 1}",
                key=name,
            )


def _breakers(params: SamplingParams, tokenizer: Any) -> frozenset[int]:
    """Return the tokens over which DRY sees no repetition."""
    if not params.dry_multiplier or not params.dry_sequence_breakers:
        return frozenset()
    if tokenizer is None:
        raise GenerationError(
            "dry_sequence_breakers need a tokenizer; give one to the Decoder, or "
            "dry_sequence_breakers=[]"
        )
    return breaker_tokens(params.dry_sequence_breakers, tokenizer)


def _bans(
    words: Sequence[str], tokenizer: Any, adapter: ModelAdapter, *, start: int
) -> list[LogitsProcessor]:
    """Return what keeps words out of a text that begins after ``start`` tokens."""
    if words and tokenizer is None:
        raise GenerationError("bad_words need a tokenizer; give one to the Decoder")
    if not words:
        return []
    return ban_words(words, tokenizer, vocab_size=adapter.vocab_size, start=start)


def _constraint(
    given: Any, adapter: ModelAdapter, tokenizer: Any, *, eos: Set[int], fresh: bool
) -> Constraint | None:
    """Return the constraint of a request in its starting state."""
    if given is None or isinstance(given, Constraint):
        return given
    makers: dict[str, Callable[..., Constraint]] = {
        "regex": regex_constraint,
        "json_schema": json_schema_constraint,
    }
    if not isinstance(given, Mapping) or len(given) != 1 or not set(given) <= set(makers):
        raise ConfigError(
            'a constraint is {"regex": ...}, {"json_schema": ...} or an object with fork, advance '
            f"and mask, not {shortened(given)}",
            key="constraint",
            value=given,
        )
    if tokenizer is None:
        raise GenerationError("a constraint on text needs a tokenizer; give one to the Decoder")
    ((kind, grammar),) = given.items()
    return makers[kind](
        grammar,
        tokenizer,
        vocab_size=adapter.vocab_size,
        eos_token_ids=eos,
        fresh=fresh,
    )
