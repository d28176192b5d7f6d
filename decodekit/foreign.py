"""What callers bring along from ``transformers``: logits processors, criteria, streamers.

They are taken by what they can do; transformers itself is not needed for it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from decodekit.errors import ConfigError, GenerationError, shortened
from decodekit.processors import name_of
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
        ConfigError: One cannot be called, or seems to keep a state and has no ``fork()``: which
            rows are asked for, and in which order, is a verifier's business.
    """
    processors = [] if given is None else _several(given, key="logits_processor")
    for processor in processors:
        if callable(getattr(processor, "fork", None)):
            continue
        reason = _state_of(processor, prompt, vocab_size)
        if reason is not None:
            raise ConfigError(
                f"the logits processor {name_of(processor)} {reason}; give it fork(), which "
                "returns a copy in the same state, or leave it out",
                key="logits_processor",
            )
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
    criteria = [] if given is None else _several(given, key="stopping_criteria")
    return [_rule(criterion, prompt) for criterion in criteria]


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
    """Return what was given as a flat list; lists in it are opened."""
    # A LogitsProcessorList is a list that can be called.
    if isinstance(given, (list, tuple)):
        return [item for inner in given for item in _several(inner, key=key)]
    if not callable(given):
        raise ConfigError(
            f"{key} must be callable, not {shortened(given)}; several are given as a list", key=key
        )
    return [given]


def _rule(criterion: Callable[..., Any], prompt: Sequence[int]) -> Criterion:
    before = tuple(prompt)

    def ends(tokens: Sequence[int]) -> bool:
        verdict = criterion(torch.tensor([[*before, *tokens]]), None)
        try:
            ends = torch.as_tensor(verdict)
            if not isinstance(verdict, (str, bytes)) and ends.numel():
                return bool(ends.all())
        except (TypeError, ValueError, RuntimeError):
            pass
        raise GenerationError(
            f"the stopping criterion {name_of(criterion)} must return whether the text ends, True "
            f"or False, not {shortened(verdict)}"
        )

    return ends


def _state_of(processor: Any, prompt: Sequence[int], vocab_size: int) -> str | None:
    """Return how a processor seems to keep a state; None if it does not."""
    kind = type(processor)
    if kind.__module__.startswith("transformers.") and kind.__name__ not in _STATEFUL:
        return None
    # What a bound method or a partial function works on is where it may keep something.
    parts = [processor, getattr(processor, "__self__", None), getattr(processor, "func", None)]
    parts += [getattr(part, "__self__", None) for part in parts]
    if kind.__name__ in _STATEFUL or any(_holds_model(part) for part in parts):
        return "keeps a state"
    if any(isinstance(part, FunctionType) and _sees_model(part) for part in parts):
        return None  # a model is too large for a copy
    try:
        trial, *_ = watched = copy.deepcopy([_detached(part) for part in parts if part is not None])
    except Exception:
        return "cannot be copied, so it may keep a state"
    return "keeps a state" if _changes(trial, watched, prompt, vocab_size) else None


def _detached(part: Any) -> Any:
    """Return a function as one whose closure and defaults can be copied; all else as it is."""
    return _Function(part) if isinstance(part, FunctionType) else part


class _Function:
    """A plain function over a closure and defaults of its own, once it has been copied."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self.kept = (_closure(function), function.__defaults__, function.__kwdefaults__)

    def __call__(self, *arguments: Any) -> Any:
        closure, defaults, keywords = self.kept
        like, cells = self._function, tuple(map(CellType, closure))
        copied = FunctionType(like.__code__, like.__globals__, like.__name__, defaults, cells)
        copied.__kwdefaults__ = keywords
        try:
            return copied(*arguments)
        finally:
            self.kept = (_closure(copied), defaults, keywords)

    @property
    def state(self) -> list[Any]:
        """Everything that a call could change."""
        return [*self.kept[0], *self.kept[1:]]


def _closure(function: FunctionType) -> list[Any]:
    """Return what a function closes over; a name that has no value yet is None."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            values.append(None)
    return values


def _holds_model(part: object) -> bool:
    return any(isinstance(value, nn.Module) for value in getattr(part, "__dict__", {}).values())


def _sees_model(function: FunctionType) -> bool:
    return any(isinstance(value, nn.Module) for value in _closure(function))


def _changes(trial: Any, watched: list[Any], prompt: Sequence[int], vocab_size: int) -> bool:
    """Return whether ``trial`` or what it works on changes when called, or its answers do."""
    scores = torch.linspace(-3.0, 3.0, vocab_size)[None]

    def answer(ids: Sequence[int]) -> Tensor:
        # Its own copy of the scores: transformers' processors may write into them.
        return torch.as_tensor(trial(torch.tensor([list(ids)]), scores.clone())).clone()

    with torch.random.fork_rng(devices=[]):
        try:
            # The first call may prepare things; what counts is what happens after it.
            answers = [answer(prompt)]
            before = _contents(watched)
            answers += [answer(prompt), answer(prompt)]
            if len(prompt) > 1:
                answer(prompt[:-1])
                answers.append(answer(prompt))
        except Exception:
            # It may want another dtype or device, or know some prefixes only; the request will say.
            return False
    same = all(
        torch.allclose(answers[0], other, rtol=0, atol=0, equal_nan=True) for other in answers
    )
    return not same or before != _contents(watched)


def _contents(watched: list[Any]) -> list[bytes | None]:
    """Return what objects hold, in a form that can be compared; None where there is none."""
    return [
        _pickled(value)
        for part in watched
        for value in (part.state if isinstance(part, _Function) else [_attributes(part)])
    ]


def _attributes(part: Any) -> dict[str, Any]:
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**{name: getattr(part, name, None) for name in slots}, **getattr(part, "__dict__", {})}


def _pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:
        return None
