"""One request under way: accepted runs as they come, and the result so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from threading import Event, RLock
from types import TracebackType
from typing import Any

import torch

from decodekit.decoder.answer import Answer
from decodekit.decoder.result import GenerationResult, TextChunk
from decodekit.engine.loop import StepRecord
from decodekit.errors import NoStopIteration

__all__ = ["GenerationStream"]


class GenerationStream:
    """An iterator over the accepted runs of one request, made by ``Decoder.stream``.

    ``for`` and ``async for`` both work; the latter runs each step in a thread, so that the event
    loop goes on. ``result`` holds what has been decoded so far at any time, also after an
    interruption.

    Args:
        answer: What is decoded.
        decode: Starts decoding; it is given a function that says whether to give up. Nothing is
            run before the first step is asked for.
        streamer: Gets the token ids of the prompt and of every run, like those of ``transformers``.
    """

    def __init__(
        self,
        answer: Answer,
        decode: Callable[[Callable[[], bool]], Generator[list[StepRecord], None, None]],
        *,
        streamer: Any = None,
    ) -> None:
        self._answer = answer
        self._cancelled = Event()
        self._records = decode(self._cancelled.is_set)
        self._streamer = streamer
        self._end_streamer = None if streamer is None else _Once(partial(_end, streamer))
        self._lock = RLock()  # one step at a time, whoever asks for it
        self._decoding = False
        self._begun = False

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        chunk = self._step()
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self

    async def __anext__(self) -> TextChunk:
        try:
            chunk = await asyncio.to_thread(self._step)
        except asyncio.CancelledError:
            self.cancel()  # the thread cannot be stopped in mid-step; it ends with it
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Close without holding up the event loop; for ``contextlib.aclosing``."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self) -> GenerationResult:
        """Decode to the end and return the result."""
        for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request after the pass that is under way; may be called from any thread."""
        self._cancelled.set()
        self._answer.give_up()
        self._end_if_cancelled()

    def close(self) -> None:
        """End the request where it is, waiting for a step that another thread runs."""
        self._cancelled.set()
        with self._lock:
            if not self._decoding:  # from within its own step: it ends with the step
                self._end()

    @property
    def result(self) -> GenerationResult:
        """What has been decoded so far; its ``finish_reason`` is None while it is under way."""
        return self._answer.result

    def _step(self) -> TextChunk | None:
        """Run the next step; return None at the end."""
        try:
            with self._lock:
                return self._locked_step()
        finally:
            self._end_if_cancelled()  # nobody may ask for another step

    def _locked_step(self) -> TextChunk | None:
        if self._cancelled.is_set():
            self._end()
            return None
        try:
            if not self._begun:
                self._begun = True
                self._put([self._answer.prompt])  # as generate does; streamers can skip it
            self._decoding = True
            records = next(self._records, None)
            self._decoding = False
            if records is None:
                self._end()
                return None
            chunk = self._answer.add(records[0])
            self._put(chunk.tokens)
            return chunk
        except BaseException:
            self._decoding = False
            self._end()
            raise

    def _put(self, tokens: Sequence[object]) -> None:
        if self._streamer is not None:
            with NoStopIteration(f"put() of the streamer {type(self._streamer).__name__}"):
                self._streamer.put(torch.tensor(tokens))

    def _end_if_cancelled(self) -> None:
        """Let go at once if no step is under way; if one is, it does so itself."""
        if self._cancelled.is_set() and self._lock.acquire(blocking=False):
            try:
                if not self._decoding:
                    self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        """Let go of the model, and of a streamer's reader."""
        self._answer.give_up()
        self._records.close()
        if self._end_streamer is not None:
            self._end_streamer()


def _end(streamer: Any) -> None:
    with NoStopIteration(f"end() of the streamer {type(streamer).__name__}"):
        streamer.end()


class _Once:
    """Calls a function once: when it is called itself, or else when nobody holds it any more.

    The reader of a streamer must not wait for a stream that was dropped.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()

    def __del__(self) -> None:
        self()
