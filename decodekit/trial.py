"""Does a logits processor keep a state? A copy of it is tried; it is not called itself."""

from __future__ import annotations

import copy
import pickle
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["state_of"]

# Processors of transformers that are no function of the prefix and the scores alone.
_STATEFUL = (
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
)


def state_of(processor: Any, prompt: Sequence[int], vocab_size: int) -> str | None:
    """Return, as a predicate, how a processor seems to keep a state; None if it does not.

    Args:
        processor: Anything that can be called with ``input_ids`` [1, L] and ``scores`` [1, V].
        prompt: Token ids to try it on.
        vocab_size: V.
    """
    kind = type(processor)
    if kind.__name__ in _STATEFUL:
        return "keeps a state"
    if kind.__module__.startswith("transformers."):
        return None
    try:
        reachable = _reachable(processor, set())
        if any(isinstance(part, nn.Module) for part in reachable):
            # A model is too large for a copy. A function may well ask one; an object that holds
            # one usually holds its cache, too.
            return None if isinstance(processor, types.FunctionType) else "keeps a state"
        trial = _copied(processor, reachable)
    except Exception:
        return "cannot be copied, so it may keep a state"
    return "keeps a state" if _changes(trial, prompt, vocab_size) else None


def _changes(trial: Callable[..., Any], prompt: Sequence[int], vocab_size: int) -> bool:
    """Return whether ``trial`` or what it works on changes when called, or its answers do."""
    scores = torch.linspace(-3.0, 3.0, vocab_size)[None]

    def answer(ids: Sequence[int]) -> Tensor:
        # Its own copy of the scores: transformers' processors may write into them.
        return torch.as_tensor(trial(torch.tensor([list(ids)]), scores.clone())).clone()

    with torch.random.fork_rng(devices=[]):
        try:
            # The first call may prepare things; what counts is what happens after it.
            answers = [answer(prompt)]
            before = _contents(trial)
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
    return not same or before != _contents(trial)


_ATOMS = (type(None), bool, int, float, complex, str, bytes, type)
_SHARED = (types.ModuleType, type(threading.Lock()), type(threading.RLock()))


def _reachable(part: Any, seen: set[int]) -> list[Any]:
    """Return a thing and all that it holds: closures, attributes, elements, and what those hold."""
    if isinstance(part, _ATOMS) or id(part) in seen:
        return []
    seen.add(id(part))
    found = [part]
    if not isinstance(part, (*_SHARED, Tensor, nn.Module)):
        for inner in _inside(part):
            found += _reachable(inner, seen)
    return found


def _inside(part: Any) -> list[Any]:
    """Return what a thing holds directly."""
    if isinstance(part, types.FunctionType):
        return [*_closure(part), part.__defaults__, part.__kwdefaults__, vars(part)]
    if isinstance(part, types.MethodType):
        return [part.__func__, part.__self__]
    if isinstance(part, partial):
        return [part.func, part.args, part.keywords]
    if isinstance(part, Mapping):
        return [*part.keys(), *part.values()]
    if isinstance(part, (list, tuple, set, frozenset)):
        return list(part)
    return list(_attributes(part).values())


def _closure(function: types.FunctionType) -> list[Any]:
    """Return what a function closes over; a name that has no value yet is None."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            values.append(None)
    return values


def _attributes(part: Any) -> dict[str, Any]:
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(part, name) for name in slots if hasattr(part, name)}
    return {**found, **getattr(part, "__dict__", {})}


def _copied(part: Any, reachable: Sequence[Any]) -> Any:
    """Return a copy that shares no state with ``part``, functions with what they close over."""
    memo: dict[int, Any] = {}  # what is in it is no atom to deepcopy, as a function otherwise is
    functions = [inner for inner in reachable if isinstance(inner, types.FunctionType)]
    for function in functions:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        memo[id(function)] = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells
        )
    memo.update((id(inner), inner) for inner in reachable if isinstance(inner, _SHARED))
    for function in functions:
        made: types.FunctionType = memo[id(function)]
        for cell, value in zip(made.__closure__ or (), _closure(function), strict=True):
            cell.cell_contents = copy.deepcopy(value, memo)
        made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        vars(made).update(copy.deepcopy(vars(function), memo))
    return copy.deepcopy(part, memo)


def _contents(part: Any) -> list[Any]:
    """Return what a thing and all that it holds are, in a form that can be compared."""
    return [_value(inner) for inner in _leaves(part, set())]


def _leaves(part: Any, seen: set[int]) -> list[Any]:
    if isinstance(part, (*_ATOMS, *_SHARED, Tensor)):
        return [part]
    if id(part) in seen:
        return []
    seen.add(id(part))
    inside = _inside(part)
    return [leaf for inner in inside for leaf in _leaves(inner, seen)] or [part]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (str(leaf.dtype), tuple(leaf.shape), leaf.detach().cpu().tolist())
    if isinstance(leaf, _ATOMS):
        return repr(leaf)
    try:
        return pickle.dumps(leaf)
    except Exception:
        return None
