"""The answer to one request, as it grows step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import RLock

from decodekit.decoder.result import GenerationResult, GenerationStats, TextChunk
from decodekit.engine.detokenizer import IncrementalText
from decodekit.engine.logprobs import TokenLogprob
from decodekit.engine.loop import SequenceState, StepRecord

__all__ = ["Answer"]


class Answer:
    """What has been decoded of one request, and how it went.

    Args:
        prompt: The token ids that are continued.
        state: The sequence that is decoded.
        text: The text that its stop rules feed; None if there is no tokenizer.
        started: When the request was made, by ``time.perf_counter``.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        state: SequenceState,
        *,
        text: IncrementalText | None,
        started: float,
    ) -> None:
        self.state = state
        self.prompt = tuple(prompt)
        self._text = text
        self._started = started
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._steps = self._nodes = 0
        self._first = self._last = self._forward = 0.0
        self._finish_reason = state.rules.finish_reason
        self._given_up = False
        self._lock = RLock()  # a result is asked for from any thread

    def add(self, record: StepRecord) -> TextChunk:
        """Take in a step; return what it adds for a reader."""
        with self._lock:
            self._last = time.perf_counter() - self._started
            self._first = self._first or self._last
            self._forward += record.forward_seconds
            self._steps += 1
            self._nodes += record.nodes
            self._tokens.extend(record.tokens)
            self._logprobs.extend(record.logprobs or ())
            self._finish_reason = self.state.rules.finish_reason
            return TextChunk(
                text=self._text.take() if self._text is not None else "",
                tokens=record.tokens,
                finish_reason=self._finish_reason,
                logprobs=None if record.logprobs is None else list(record.logprobs),
            )

    def give_up(self) -> None:
        """Take no further step: what has not ended by now was cancelled."""
        self._given_up = True

    @property
    def result(self) -> GenerationResult:
        """What there is so far; its ``finish_reason`` is None while the request is under way."""
        with self._lock:
            return GenerationResult(
                text=self._text.shown if self._text is not None else "",
                tokens=list(self._tokens),
                finish_reason=self._finish_reason or ("cancelled" if self._given_up else None),
                stats=GenerationStats(
                    steps=self._steps,
                    tokens=len(self._tokens),
                    nodes=self._nodes,
                    seconds=self._last,
                    forward_seconds=self._forward,
                    time_to_first_token=self._first,
                ),
                prompt_tokens=list(self.prompt),
                logprobs=None if self.state.logprobs is None else list(self._logprobs),
                prompt_logprobs=(
                    None if self.state.prompt_logprobs is None else list(self.state.prompt_scores)
                ),
            )
