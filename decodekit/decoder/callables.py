"""What callers bring along from ``transformers``: logits processors, criteria, streamers.

They are taken by what they can do; transformers itself is not needed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from decodekit.engine.processors import name_of
from decodekit.engine.stopping import Criterion
from decodekit.errors import ConfigError, GenerationError, NoStopIteration, shortened

__all__ = ["adopt_criteria", "adopt_processors", "check_streamer"]


def adopt_processors(given: Any, *, in_order: bool) -> list[Any]:
    """Return the logits processors of a request as a list.

    Args:
        given: None, a callable ``(input_ids [1, L], scores [1, V]) -> scores [1, V]``, or several,
            for example a ``LogitsProcessorList``.
        in_order: Whether the verifier asks about the tokens of the text only, each once and in
            order; see ``Verifier``. A processor may then keep a state.

    Raises:
        ConfigError: One cannot be called, or has no ``fork()`` where rows are asked for in any
            order.
    """
    processors = [] if given is None else _several(given, key="logits_processor")
    for processor in processors:
        if not in_order and not callable(getattr(processor, "fork", None)):
            raise ConfigError(
                f"the verifier asks in any order, and the logits processor {name_of(processor)} "
                "has no fork(), which returns a copy in the same state; give it one, or use "
                "verifier=exact_match",
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
        with NoStopIteration(f"the stopping criterion {name_of(criterion)}"):
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
