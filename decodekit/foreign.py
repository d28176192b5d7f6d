"""What callers bring along from ``transformers``: logits processors, criteria, streamers.

They are taken by what they can do; transformers itself is not needed for it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decodekit.errors import ConfigError
from decodekit.processors import LogitsProcessor
from decodekit.stopping import Criterion

__all__ = ["adopt_criteria", "adopt_processors", "check_streamer"]

# Processors of transformers that are no function of the prefix and the scores alone.
_STATEFUL = (
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
)


def adopt_processors(given: Any, *, prompt: Sequence[int], vocab_size: int) -> list[Any]:
    """Return the logits processors of a request as a list.

    Args:
        given: None, a callable ``(input_ids [1, L], scores [1, V]) -> scores [1, V]``, or several,
            for example a ``LogitsProcessorList``.
        prompt: Token ids; one that may keep a state is tried on them.
        vocab_size: V.

    Raises:
        ConfigError: One cannot be called, or keeps a state and has no ``fork()``: rows are not
            asked for in the order of the text alone.
    """
    processors = _several(given, key="logits_processor")
    for processor in processors:
        if not callable(getattr(processor, "fork", None)):
            _check_stateless(processor, prompt, vocab_size)
    return processors


def adopt_criteria(given: Any, *, prompt: Sequence[int]) -> list[Criterion]:
    """Return the stopping criteria of a request as rules for its new tokens.

    Args:
        given: None, a callable ``(input_ids [1, L], scores) -> bool`` or boolean tensor, or
            several, for example a ``StoppingCriteriaList``; ``scores`` is None.
        prompt: Token ids before the new ones.

    Raises:
        ConfigError: One cannot be called.
    """
    return [_rule(criterion, prompt) for criterion in _several(given, key="stopping_criteria")]


def check_streamer(streamer: Any) -> None:
    """Check that a streamer has ``put(tokens)`` and ``end()``.

    Raises:
        ConfigError: It has not.
    """
    for method in ("put", "end"):
        if not callable(getattr(streamer, method, None)):
            raise ConfigError(
                f"a streamer needs put(tokens) and end(); {type(streamer).__name__} has no "
                f"{method}",
                key="streamer",
            )


def _several(given: Any, *, key: str) -> list[Any]:
    if given is None:
        return []
    items = list(given) if isinstance(given, Iterable) else [given]
    for item in items:
        if not callable(item):
            raise ConfigError(f"{key} must be callable, not {item!r:.60}", key=key)
    return items


def _rule(criterion: Callable[..., Any], prompt: Sequence[int]) -> Criterion:
    def ends(tokens: Sequence[int]) -> bool:
        verdict = criterion(torch.tensor([[*prompt, *tokens]]), None)
        return bool(torch.as_tensor(verdict).all())

    return ends


def _check_stateless(processor: LogitsProcessor, prompt: Sequence[int], vocab_size: int) -> None:
    """Refuse a processor that answers one question differently the second time."""
    kind = type(processor)
    if kind.__module__.startswith("transformers.") and kind.__name__ not in _STATEFUL:
        return
    if (
        kind.__name__ in _STATEFUL
        or _holds_model(processor)
        or _changes(processor, prompt, vocab_size)
    ):
        raise ConfigError(
            f"the logits processor {_name(processor)} keeps a state; give it fork(), which returns "
            "a copy in the same state, or leave it out",
            key="logits_processor",
        )


def _holds_model(processor: LogitsProcessor) -> bool:
    return any(
        isinstance(value, nn.Module) for value in getattr(processor, "__dict__", {}).values()
    )


def _changes(processor: LogitsProcessor, prompt: Sequence[int], vocab_size: int) -> bool:
    """Return whether a copy of ``processor`` changes when it is called, or its answers do."""
    try:
        trial = copy.deepcopy(processor)
    except Exception:
        return True
    scores = torch.linspace(-3.0, 3.0, vocab_size)[None]
    with torch.random.fork_rng(devices=[]):
        # The first call may prepare things; what counts is what happens after it.
        first = _answer(trial, prompt, scores)
        before = _contents(trial)
        _answer(trial, [*prompt, vocab_size - 1], scores)
        again = _answer(trial, prompt, scores)
    return before != _contents(trial) or not torch.equal(first, again)


def _answer(processor: LogitsProcessor, ids: Sequence[int], scores: Tensor) -> Tensor:
    # Its own copy of the scores: transformers' processors may write into them.
    return torch.as_tensor(processor(torch.tensor([list(ids)]), scores.clone())).clone()


def _contents(processor: LogitsProcessor) -> bytes | None:
    """Return the attributes in a form that can be compared; None if there is none."""
    try:
        return pickle.dumps(vars(processor))
    except Exception:
        return None


def _name(processor: LogitsProcessor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
