"""From what a caller asks for to a sequence that can be decoded; all options are checked here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from decodekit.answer import Answer
from decodekit.constraint import Constraint
from decodekit.dry import breaker_tokens
from decodekit.errors import (
    ConfigError,
    GenerationError,
    nearest,
    require_at_least,
    shortened,
)
from decodekit.foreign import adopt_criteria, adopt_processors
from decodekit.generation_defaults import GenerationDefaults
from decodekit.guidance import json_schema_constraint, regex_constraint
from decodekit.interfaces import ModelAdapter, Strategy, Verifier
from decodekit.loop import SequenceState
from decodekit.model_processors import banned_ids_of, model_processors_of
from decodekit.params import SamplingParams
from decodekit.processors import encode_bad_words, processors_of
from decodekit.prompts import Prompt, as_token, encode_prompt
from decodekit.sampling import make_sampler
from decodekit.shaping import Shaper
from decodekit.stopping import StopRules
from decodekit.text import IncrementalText

__all__ = ["Request", "prepare", "request_of"]

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


@dataclass
class Request:
    """One prompt and how it is to be continued; what is None is as the decoder has it.

    Attributes:
        prompt: Text, token ids (a sequence or a tensor of one prompt) or chat messages
            (``[{"role": "user", "content": "..."}]``).
        max_new_tokens: Most new tokens.
        sampling: How tokens are chosen.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Token ids, or runs of them, that end the text. They are the last of the
            tokens; their text is not part of the text.
        logprobs: Report the log-probability of every new token, and those of so many of the most
            probable ones, 0 or more.
        prompt_logprobs: Report the log-probability of every token of the prompt, likewise.
        logits_processor: ``transformers`` logits processors, or callables
            ``(input_ids [1, L], scores [1, V]) -> scores [1, V]``; after those of ``sampling``.
        stopping_criteria: ``transformers`` stopping criteria, or callables
            ``(input_ids [1, L], None) -> bool``, asked after each token.
        constraint: A grammar that the text follows: a ``Constraint`` in its starting state,
            ``{"regex": "..."}`` or ``{"json_schema": ...}``.
        chat: Whether a text prompt is wrapped in the chat template.
    """

    prompt: Prompt
    max_new_tokens: int | None = None
    sampling: SamplingParams | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processor: Any = None
    stopping_criteria: Any = None
    constraint: Constraint | Mapping[str, Any] | None = None
    chat: bool | None = None


def request_of(
    prompt: Prompt | Request,
    options: Mapping[str, Any],
    sampling: SamplingParams,
    defaults: GenerationDefaults | None = None,
) -> tuple[Request, GenerationDefaults]:
    """Return a request from a prompt, or from a request, and options by keyword.

    A keyword goes before all else; then come fields of the request's sampling, or without one of
    the decoder's, that are not at their defaults; then what the model asks for.

    Args:
        prompt: The prompt, or a request.
        options: Fields of ``Request`` and of ``SamplingParams``, which go before what the request
            says; None leaves one as it is.
        sampling: How tokens are chosen where neither says.
        defaults: What the model asks for where none of them says otherwise.

    Returns:
        The request, and what is left of ``defaults``, which the request's ``sampling`` holds as
        far as it can.

    Raises:
        ConfigError: An option is unknown or out of its range.
    """
    request = prompt if isinstance(prompt, Request) else Request(prompt)
    given = {name: value for name, value in options.items() if value is not None}
    known = {field.name for field in fields(Request)} - {"prompt"}
    for name in given:
        if name not in known | _SAMPLING:
            hint = nearest(name, known | _SAMPLING)
            raise ConfigError(f"unknown option {name!r}: {hint}", key=name)
    request = replace(request, **{name: given[name] for name in given if name in known})
    base = request.sampling or sampling
    if not isinstance(base, SamplingParams):
        raise ConfigError(
            f"sampling must be SamplingParams, not {shortened(base)}; its fields may also be given "
            "by keyword",
            key="sampling",
        )
    changes = {name: given[name] for name in given if name in _SAMPLING}
    params = replace(base, **changes)
    left = (defaults or GenerationDefaults()).without(changes).under(params)
    return replace(request, sampling=left.filled(params)), left


def prepare(
    request: Request,
    adapter: ModelAdapter,
    tokenizer: Any,
    *,
    strategy: Strategy,
    verifier: Verifier,
    max_new_tokens: int,
    chat: bool,
    defaults: GenerationDefaults | None = None,
) -> Answer:
    """Return the empty answer to a request, ready to be decoded.

    Args:
        request: What is asked for.
        adapter: The model.
        tokenizer: Its tokenizer, or None.
        strategy: What is proposed.
        verifier: What is accepted.
        max_new_tokens: Most new tokens, where the request does not say.
        chat: Whether a text prompt is wrapped in the chat template, where it does not say.
        defaults: What the model asks for beside the request's ``sampling``.

    Raises:
        ConfigError: An option is out of its range or cannot work here.
        GenerationError: The prompt is empty, has an unknown token, or is too long.
    """
    started = time.perf_counter()
    chat = chat if request.chat is None else request.chat
    params = request.sampling or SamplingParams()
    if request.max_new_tokens is not None:
        max_new_tokens = request.max_new_tokens
    limit = adapter.max_positions
    prompt = encode_prompt(
        request.prompt,
        tokenizer,
        chat=chat,
        vocab_size=adapter.vocab_size,
        max_positions=limit,
    )
    if request.logprobs is not None:
        require_at_least(request.logprobs, 0, key="logprobs")
    if request.prompt_logprobs is not None:
        require_at_least(request.prompt_logprobs, 0, key="prompt_logprobs")
    if not isinstance(chat, bool):
        raise ConfigError(
            f"chat must be true or false, not {shortened(chat)}", key="chat", value=chat
        )
    sequences = _token_runs(request.stop_token_ids, adapter.vocab_size)
    # A plain text goes on where the prompt ends; an answer in a chat starts afresh.
    text = _new_text(
        request.stop,
        tokenizer,
        context=prompt[-4:] if isinstance(request.prompt, str) and not chat else (),
        undo=max(map(len, sequences), default=0),
    )
    state = SequenceState(
        committed=list(prompt),
        proposer=strategy.new_proposer(params),
        verifier=verifier,
        sampler=make_sampler(params),
        rules=StopRules(
            max_new_tokens=max_new_tokens,
            room=None if limit is None else limit - len(prompt),
            eos_token_ids=adapter.eos_token_ids,
            sequences=sequences,
            criteria=adopt_criteria(request.stopping_criteria, prompt=prompt),
            text=text,
        ),
        shaper=_shaper(
            request, params, prompt, adapter, tokenizer, sequences, defaults, max_new_tokens
        ),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
    return Answer(prompt, state, text=text, started=started)


def _new_text(
    stop: str | Sequence[str] | None, tokenizer: Any, *, context: Sequence[int], undo: int
) -> IncrementalText | None:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise ConfigError(f"stop must be strings, not {shortened(stop)}", key="stop", value=stop)
    if tokenizer is not None:
        return IncrementalText(tokenizer, stop=strings, context=context, undo=undo)
    if strings:
        raise GenerationError("stop strings need a tokenizer; give one to the Decoder")
    return None


def _token_runs(given: Any, vocab_size: int) -> list[tuple[int, ...]]:
    """Return stop tokens as runs; a number stands for a run of one."""
    if given is None:
        return []
    plain = given.tolist() if hasattr(given, "tolist") else given
    items = plain if isinstance(plain, (list, tuple)) else [plain]
    try:
        runs = [
            tuple(map(as_token, item if isinstance(item, (list, tuple)) else [item]))
            for item in items
        ]
        good = all(run and all(0 <= token < vocab_size for token in run) for run in runs)
    except TypeError:
        good = False
    if not good:
        raise ConfigError(
            "stop_token_ids must be token ids of the model, or runs of them, not "
            f"{shortened(given)}",
            key="stop_token_ids",
            value=given,
        )
    return runs


def _shaper(
    request: Request,
    params: SamplingParams,
    prompt: Sequence[int],
    adapter: ModelAdapter,
    tokenizer: Any,
    sequences: Sequence[tuple[int, ...]],
    defaults: GenerationDefaults | None,
    max_new_tokens: int,
) -> Shaper | None:
    """Return what changes the logits; None if nothing does, which saves a copy of each row."""
    defaults = defaults or GenerationDefaults()
    ends = sorted(adapter.eos_token_ids)
    processors, last = model_processors_of(
        defaults, prompt_length=len(prompt), max_new_tokens=max_new_tokens, end_ids=ends
    )
    words, least = banned_ids_of(defaults, end_ids=ends), defaults.further.get("min_length", 0)
    if least > len(prompt):
        params = replace(params, min_new_tokens=least - len(prompt))
    if params.changes_logits or words:
        for name in ("logit_bias", "suppress_tokens"):
            high = max(getattr(params, name), default=0)
            if high >= adapter.vocab_size:
                raise ConfigError(
                    f"{name} names token {high}; the model's last is {adapter.vocab_size - 1}",
                    key=name,
                )
        if params.bad_words and tokenizer is None:
            raise GenerationError("bad_words need a tokenizer; give one to the Decoder")
        breakers: frozenset[int] = frozenset()
        if params.dry_multiplier and params.dry_sequence_breakers:
            if tokenizer is None:
                raise GenerationError(
                    "dry_sequence_breakers need a tokenizer; give one to the Decoder, or "
                    "dry_sequence_breakers=[]"
                )
            breakers = breaker_tokens(params.dry_sequence_breakers, tokenizer)
        processors += processors_of(
            params,
            prompt_length=len(prompt),
            end_ids=sorted({*ends, *(run[0] for run in sequences if len(run) == 1)}),
            bad_words=encode_bad_words(params.bad_words, tokenizer) if params.bad_words else words,
            breakers=breakers,
        )
    processors += last
    processors += adopt_processors(
        request.logits_processor, prompt=prompt, vocab_size=adapter.vocab_size
    )
    constraint = _constraint(request.constraint, adapter, tokenizer)
    return Shaper(processors, constraint) if processors or constraint is not None else None


def _constraint(given: Any, adapter: ModelAdapter, tokenizer: Any) -> Constraint | None:
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
        eos_token_ids=adapter.eos_token_ids,
    )
