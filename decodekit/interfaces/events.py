"""What a finished step did, and why a text ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FinishReason", "StepEvent"]

FinishReason = Literal["eos", "stop", "length", "capacity", "cancelled"]
"""Why a text ended: an end-of-text token; a stop string, stop tokens or a criterion;
``max_new_tokens``; the model's last position; or it was given up, by the caller or an error."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What one finished step did for one sequence.

    Attributes:
        request: A number that all steps of one request share, and no other request of this process
            has; a batch is one request.
        sequence: Which sequence of the request, from 0.
        step: Which step of the request, from 0.
        tokens: The emitted tokens, at least one.
        nodes: T, the guessed nodes of this sequence in the pass.
        accepted: How many of them were accepted and committed.
        forward_seconds: Wall time of the step in the model, for the whole batch; on a GPU, until
            its calls returned.
        finish_reason: Why the text ends with this step; None if it goes on.
    """

    request: int
    sequence: int
    step: int
    tokens: tuple[int, ...]
    nodes: int
    accepted: int
    forward_seconds: float
    finish_reason: FinishReason | None
