"""From what a caller asks for to a sequence that can be decoded; all options are checked here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from decodekit.answer import Answer
from decodekit.bad_words import ban_words
from decodekit.chat import ChatOptions
from decodekit.constraint import Constraint
from decodekit.errors import (
    ConfigError,
    GenerationError,
    nearest,
    require_at_least,
    shortened,
)
from decodekit.foreign import adopt_criteria, adopt_processors
from decodekit.guidance import json_schema_constraint, regex_constraint
from decodekit.interfaces import ModelAdapter, Strategy, Verifier
from decodekit.loop import SequenceState
from decodekit.option_names import own_names, with_other_names
from decodekit.padding import without_padding
from decodekit.params import SamplingParams
from decodekit.processors import LogitsProcessor, processors_of
from decodekit.prompts import Prompt, as_token, encode_prompt, uses_template
from decodekit.sampling import make_sampler
from decodekit.shaping import Shaper
from decodekit.stopping import StopRules
from decodekit.text import IncrementalText, context_of

__all__ = ["Request", "prepare", "request_of"]

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


@with_other_names
@dataclass
class Request:
    """One prompt and how it is to be continued; what is None is as the decoder has it.

    Attributes:
        prompt: Text, token ids (a sequence or a tensor of one prompt) or chat messages
            (``[{"role": "user", "content": "..."}]``).
        max_new_tokens: Most new tokens.
        sampling: How tokens are chosen.
        stop: Strings that end the text; they are not part of it. They may name special tokens.
        stop_token_ids: Token ids, or runs of them, that end the text. They are the last of the
            tokens; their text is not part of the text.
        eos_token_id: The id, or ids, that end the text in place of the model's own.
        ignore_eos: Whether the text goes on after an end-of-text token, as after any other.
        n: How many answers; sample ``i`` is drawn with the seed plus ``i``. ``Decoder.generate``
            then gives a list of them.
        include_stop_str_in_output: Whether what ends the text, of ``stop`` and ``stop_token_ids``,
            is its end all the same.
        skip_special_tokens: Whether special tokens are left out of the text; by default they are.
        logprobs: Report the log-probability of every new token, and those of so many of the most
            probable ones, 0 or more.
        logits_processor: ``transformers`` logits processors, or callables
            ``(input_ids [1, L], scores [1, V]) -> scores [1, V]``; after those of ``sampling``.
        stopping_criteria: ``transformers`` stopping criteria, or callables
            ``(input_ids [1, L], None) -> bool``, asked after each token.
        constraint: A grammar that the text follows: a ``Constraint`` in its starting state,
            ``{"regex": "..."}`` or ``{"json_schema": ...}``.
        chat: Whether a text prompt is wrapped in the chat template.
        continue_final_message: Whether the last of the messages is continued, not answered; by
            default if it is the assistant's.
        add_generation_prompt: Whether the header of an answer follows the messages; by default if
            the last of them is not continued.
        tools: JSON schemas or functions that the chat template tells the model about.
        chat_template_kwargs: Variables of the chat template, for example
            ``{"enable_thinking": False}``.
    """

    prompt: Prompt
    max_new_tokens: int | None = None
    sampling: SamplingParams | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    eos_token_id: int | Sequence[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    logits_processor: Any = None
    stopping_criteria: Any = None
    constraint: Constraint | Mapping[str, Any] | None = None
    chat: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


def request_of(
    prompt: Prompt | Request, options: Mapping[str, Any], sampling: SamplingParams
) -> Request:
    """Return a request from a prompt, or from a request, and options by keyword.

    Args:
        prompt: The prompt, or a request.
        options: Fields of ``Request`` and of ``SamplingParams``, which go before what the request
            says; None leaves one as it is.
        sampling: How tokens are chosen where neither says.

    Raises:
        ConfigError: An option is unknown or out of its range.
    """
    request = prompt if isinstance(prompt, Request) else Request(prompt)
    if isinstance(request.prompt, Mapping):
        request = replace(request, prompt=without_padding(request.prompt))
    known = {field.name for field in fields(Request)} - {"prompt"}
    given = own_names(
        {name: value for name, value in options.items() if value is not None}, known | _SAMPLING
    )
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
    return replace(request, sampling=replace(base, **changes))


def prepare(
    request: Request,
    adapter: ModelAdapter,
    tokenizer: Any,
    *,
    strategy: Strategy,
    verifier: Verifier,
    max_new_tokens: int,
    chat: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
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
        chat_template_kwargs: Variables of the template, where it does not say.

    Raises:
        ConfigError: An option is out of its range or cannot work here.
        GenerationError: The prompt is empty, has an unknown token, or is too long.
    """
    started = time.perf_counter()
    chat = uses_template(request.prompt, tokenizer, asked=request.chat, default=chat)
    params = request.sampling or SamplingParams()
    limit = adapter.max_positions
    encoded = encode_prompt(
        request.prompt,
        tokenizer,
        chat=chat,
        vocab_size=adapter.vocab_size,
        max_positions=limit,
        options=ChatOptions(
            continue_final_message=request.continue_final_message,
            add_generation_prompt=request.add_generation_prompt,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
        ),
        template_defaults=chat_template_kwargs or {},
    )
    prompt = encoded.tokens
    if request.logprobs is not None:
        require_at_least(request.logprobs, 0, key="logprobs")
    _require_truth_value(chat, "chat")
    sequences = _token_runs(request.stop_token_ids, adapter.vocab_size)
    for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
        _require_truth_value(getattr(request, name), name)
    eos = _end_ids(request.eos_token_id, adapter)
    ends: Set[int] = frozenset() if request.ignore_eos else eos
    text = _new_text(
        request,
        tokenizer,
        context=() if encoded.fresh else context_of(prompt, tokenizer),
        undo=max(map(len, sequences), default=0),
    )
    state = SequenceState(
        committed=list(prompt),
        proposer=strategy.new_proposer(params),
        verifier=verifier,
        sampler=make_sampler(params),
        rules=StopRules(
            max_new_tokens=(
                max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
            ),
            room=None if limit is None else limit - len(prompt),
            eos_token_ids=ends,
            sequences=sequences,
            criteria=adopt_criteria(request.stopping_criteria, prompt=prompt),
            text=text,
            include_stop=bool(request.include_stop_str_in_output),
        ),
        shaper=_shaper(
            request,
            params,
            prompt,
            adapter,
            tokenizer,
            fresh=encoded.fresh,
            at_start=text is None or text.is_fresh,
            eos=eos,
            ends=ends
            | {run[0] for run in sequences if len(run) == 1}
            | (set() if text is None else text.stop_tokens),
            in_order=getattr(verifier, "in_order", True),
        ),
        logprobs=request.logprobs,
    )
    return Answer(prompt, state, text=text, started=started)


def _require_truth_value(value: object, name: str) -> None:
    if not isinstance(value, (bool, type(None))):
        message = f"{name} must be true or false, not {shortened(value)}"
        raise ConfigError(message, key=name, value=value)


def _new_text(
    request: Request, tokenizer: Any, *, context: Sequence[int], undo: int
) -> IncrementalText | None:
    stop = request.stop
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise ConfigError(f"stop must be strings, not {shortened(stop)}", key="stop", value=stop)
    if tokenizer is not None:
        return IncrementalText(
            tokenizer,
            stop=strings,
            context=context,
            undo=undo,
            skip_special_tokens=request.skip_special_tokens is not False,
            include_stop=bool(request.include_stop_str_in_output),
        )
    if strings:
        raise GenerationError("stop strings need a tokenizer; give one to the Decoder")
    return None


def _end_ids(given: Any, adapter: ModelAdapter) -> frozenset[int]:
    """Return the tokens that end a text: those of the request, else those of the model."""
    if given is None:
        return adapter.eos_token_ids
    plain = given.tolist() if hasattr(given, "tolist") else given
    items = plain if isinstance(plain, (list, tuple, set, frozenset)) else [plain]
    try:
        ids = frozenset(map(as_token, items))
    except TypeError:
        ids = frozenset()
    if not ids or not all(0 <= token < adapter.vocab_size for token in ids):
        raise ConfigError(
            f"eos_token_id must be a token id of the model, or several, not {shortened(given)}; "
            "ignore_eos=True goes on after each",
            key="eos_token_id",
            value=given,
        )
    return ids


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
    *,
    fresh: bool,
    at_start: bool,
    eos: Set[int],
    ends: Set[int],
    in_order: bool,
) -> Shaper | None:
    """Return what changes the logits; None if nothing does, which saves a copy of each row."""
    processors = []
    if params.changes_logits:
        for name in ("logit_bias", "suppress_tokens"):
            high = max(getattr(params, name), default=0)
            if high >= adapter.vocab_size:
                raise ConfigError(
                    f"{name} names token {high}; the model's last is {adapter.vocab_size - 1}",
                    key=name,
                )
        processors += processors_of(
            params,
            prompt_length=len(prompt),
            end_ids=sorted(ends),
            banned_texts=_bans(
                params.bad_words, tokenizer, adapter, start=len(prompt) if fresh else 0
            ),
        )
    processors += adopt_processors(request.logits_processor, in_order=in_order)
    constraint = _constraint(request.constraint, adapter, tokenizer, eos=eos, fresh=at_start)
    if not processors and constraint is None:
        return None
    return Shaper(processors, constraint, branches=not in_order)


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
