"""One request under way: accepted runs as they come, and the result so far."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

from decodekit.loop import StepRecord
from decodekit.result import GenerationResult, GenerationStats, TextChunk
from decodekit.stopping import StopRules
from decodekit.text import IncrementalText

__all__ = ["GenerationStream"]


class GenerationStream:
    """An iterator over the accepted runs of one request, made by ``Decoder.stream``.

    ``result`` holds what has been decoded so far at any time, also after an interruption.

    Args:
        prompt: The token ids that are continued.
        records: The steps; nothing is run before the first is asked for.
        rules: The stop rules that the steps are cut by.
        text: The text that the rules feed; None if there is no tokenizer.
        started: When the request was made, by ``time.perf_counter``.
    """

    def __init__(
        self,
        prompt: list[int],
        records: Generator[StepRecord, None, None],
        *,
        rules: StopRules,
        text: IncrementalText | None,
        started: float,
    ) -> None:
        self._prompt = prompt
        self._records = records
        self._rules = rules
        self._text = text
        self._started = started
        self._tokens: list[int] = []
        self._steps = self._nodes = 0
        self._first = self._last = self._forward = 0.0

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        record = next(self._records)
        self._last = time.perf_counter() - self._started
        self._first = self._first or self._last
        self._forward += record.forward_seconds
        self._steps += 1
        self._nodes += record.nodes
        self._tokens.extend(record.tokens)
        return TextChunk(
            text=self._text.take() if self._text is not None else "",
            tokens=record.tokens,
            finish_reason=self._rules.finish_reason,
        )

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> GenerationResult:
        """Decode to the end and return the result."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """End the request where it is; ``result`` holds what there is."""
        self._records.close()

    @property
    def result(self) -> GenerationResult:
        """What has been decoded so far; ``finish_reason`` is ``cancelled`` before the end."""
        return GenerationResult(
            text=self._text.text if self._text is not None else "",
            tokens=list(self._tokens),
            finish_reason=self._rules.finish_reason or "cancelled",
            stats=GenerationStats(
                steps=self._steps,
                tokens=len(self._tokens),
                nodes=self._nodes,
                seconds=self._last,
                forward_seconds=self._forward,
                time_to_first_token=self._first,
            ),
            prompt_tokens=list(self._prompt),
        )
