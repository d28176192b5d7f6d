"""From what a caller asks for to a sequence that can be decoded; all options are checked here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from decodekit.config.option_names import own_names, with_other_names
from decodekit.decoder.answer import Answer
from decodekit.decoder.callables import adopt_criteria
from decodekit.decoder.chat import ChatOptions
from decodekit.decoder.generation_defaults import GenerationDefaults
from decodekit.decoder.padding import without_padding
from decodekit.decoder.prompt import Prompt, as_token, encode_prompt, uses_template
from decodekit.decoder.request_logits import Place, shaper_of
from decodekit.engine.detokenizer import IncrementalText, context_of
from decodekit.engine.loop import SequenceState
from decodekit.engine.sampling import largest_of, make_sampler
from decodekit.engine.stopping import StopRules
from decodekit.errors import (
    ConfigError,
    GenerationError,
    nearest,
    require_at_least,
    require_true_or_false,
    require_unicode,
    shortened,
)
from decodekit.interfaces.adapter import ModelAdapter
from decodekit.interfaces.logits import Constraint
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import Strategy
from decodekit.interfaces.verifier import Verifier

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
        prompt_logprobs: Report the log-probability of every token of the prompt, likewise.
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
    prompt_logprobs: int | None = None
    logits_processor: Any = None
    stopping_criteria: Any = None
    constraint: Constraint | Mapping[str, Any] | None = None
    chat: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


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
    if isinstance(request.prompt, Mapping):
        prompt = without_padding(request.prompt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
            raise GenerationError(
                f"a Request holds one prompt, not {len(prompt)}; give a list of Requests"
            )
        request = replace(request, prompt=prompt)
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
    chat_template_kwargs: Mapping[str, Any] | None = None,
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
        chat_template_kwargs: Variables of the template, where it does not say.
        defaults: What the model asks for beside the request's ``sampling``.

    Raises:
        ConfigError: An option is out of its range or cannot work here.
        GenerationError: The prompt is empty, has an unknown token, or is too long.
    """
    started = time.perf_counter()
    chat = uses_template(request.prompt, tokenizer, asked=request.chat, default=chat)
    params = request.sampling or SamplingParams()
    if request.max_new_tokens is not None:
        max_new_tokens = request.max_new_tokens
    require_at_least(max_new_tokens, 0, key="max_new_tokens")
    limit = adapter.max_positions
    encoded = encode_prompt(
        request.prompt,
        tokenizer,
        chat=chat,
        vocab_size=adapter.vocab_size,
        max_positions=limit,
        room=min(1, max_new_tokens),
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
    if request.prompt_logprobs is not None:
        require_at_least(request.prompt_logprobs, 0, key="prompt_logprobs")
    if chat is not None:
        require_true_or_false(chat, key="chat")
    sequences = _token_runs(request.stop_token_ids, adapter.vocab_size)
    for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
        if getattr(request, name) is not None:
            require_true_or_false(getattr(request, name), key=name)
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
        sampler=make_sampler(params, largest_of(adapter)),
        rules=StopRules(
            max_new_tokens=max_new_tokens,
            room=None if limit is None else limit - len(prompt),
            eos_token_ids=ends,
            sequences=sequences,
            criteria=adopt_criteria(request.stopping_criteria, prompt=prompt),
            text=text,
            include_stop=bool(request.include_stop_str_in_output),
        ),
        shaper=shaper_of(
            params,
            adapter,
            tokenizer,
            place=Place(
                prompt_length=len(prompt),
                max_new_tokens=max_new_tokens,
                fresh=encoded.fresh,
                at_start=text is None or text.is_fresh,
                eos=eos,
                ends=ends
                | {run[0] for run in sequences if len(run) == 1}
                | (set() if text is None else text.stop_tokens),
                in_order=getattr(verifier, "in_order", True),
            ),
            defaults=defaults or GenerationDefaults(),
            logits_processor=request.logits_processor,
            constraint=request.constraint,
        ),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
    return Answer(prompt, state, text=text, started=started)


def _new_text(
    request: Request, tokenizer: Any, *, context: Sequence[int], undo: int
) -> IncrementalText | None:
    stop = request.stop
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise ConfigError(f"stop must be strings, not {shortened(stop)}", key="stop", value=stop)
    for string in strings:
        require_unicode(string, key="stop")
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
