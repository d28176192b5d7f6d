"""What callers bring along from ``transformers``: logits processors, criteria, streamers.

They are taken by what they can do; transformers itself is not needed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from decodekit.errors import ConfigError, GenerationError, shortened
from decodekit.processors import name_of
from decodekit.stopping import Criterion
from decodekit.trial import state_of

__all__ = ["adopt_criteria", "adopt_processors", "check_streamer"]


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
        reason = state_of(processor, prompt, vocab_size)
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
