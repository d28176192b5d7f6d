"""Streams: ``for`` and ``async for``, cancelling at any moment, streamers, threads, memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

from decodekit import Decoder, GenerationResult, GenerationStream, TextChunk
from decodekit.decoder.build import build_strategy
from decodekit.errors import ConfigError, DecodekitError, GenerationError
from decodekit.interfaces import Proposer
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.sampling_params import SamplingParams
from tests.support.checkpoint import save_checkpoint
from tests.support.fakes import ByteTokenizer, OracleProposer, ToyAdapter, ToyCache, plain_decode
from tests.support.tiny import greedy_loop, random_prompt, tiny_model

PROMPT = [3, 1, 4, 1, 5]
STRATEGIES = ["autoregressive", "jacobi", "prompt_lookup", "lookahead"]
V = 11
PATIENCE = 20  # seconds after which a test that waits for another thread fails
# Some characters take two tokens.
TOKENIZER = ByteTokenizer(
    [b"a", b"b ", b"\xc3", b"\xa9", b" c", b"<d>", b"\xe6\xbc", b"\xa2", b"e", b" ", b"f"]
)


def decoder_of(model: ToyAdapter, strategy: Any = "jacobi", **settings: Any) -> Decoder:
    return Decoder(model, TOKENIZER, strategy=build_strategy(strategy), **settings)


class Oracles:
    """A strategy that proposes the true text, four tokens at a time: long runs."""

    max_nodes = 8

    def __init__(self, model: ToyAdapter) -> None:
        self.text = PROMPT + plain_decode(model, PROMPT, max_new_tokens=80)

    def new_proposer(self, params: SamplingParams) -> Proposer:
        return OracleProposer(self.text, depth=4)


class Gated(ToyAdapter):
    """Stands still in the middle of one pass until it is let go on.

    Args:
        at: Which pass, from 0.

    Attributes:
        inside: Set when that pass is under way.
        go: Set this to let it go on.
    """

    def __init__(self, *args: Any, at: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.at = at
        self.inside = threading.Event()
        self.go = threading.Event()

    def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
        logits = super().forward(plans, cache)
        if len(self.forwards) == self.at + 1:
            self.inside.set()
            assert self.go.wait(PATIENCE), "nobody let the pass go on"
        return logits


async def in_pass(model: Gated) -> None:
    """Return when the pass is under way; the event loop goes on meanwhile."""
    assert await asyncio.to_thread(model.inside.wait, PATIENCE)


def check_prefix(result: GenerationResult, full: GenerationResult, chunks: Sequence[Any]) -> None:
    """Check that all parts of a result agree, with what was shown, and with the full result."""
    assert result.tokens == [token for chunk in chunks for token in chunk.tokens]
    assert result.text == "".join(chunk.text for chunk in chunks)
    assert result.tokens == full.tokens[: len(result.tokens)]
    assert full.text.startswith(result.text)
    assert TOKENIZER.decode(result.tokens).startswith(result.text)
    assert result.stats.tokens == len(result.tokens)
    assert result.stats.steps == len(chunks)
    assert result.prompt_tokens == full.prompt_tokens
    if full.logprobs is None:
        assert result.logprobs is None
    else:
        assert result.logprobs == full.logprobs[: len(result.tokens)]
        assert result.logprobs == [entry for chunk in chunks for entry in chunk.logprobs]


# --- for and async for ---------------------------------------------------------------------------


async def collect(stream: GenerationStream, into: list[TextChunk] | None = None) -> list[TextChunk]:
    chunks = [] if into is None else into
    async for chunk in stream:
        chunks.append(chunk)
    return chunks


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_async_for_gives_the_chunks_of_for(strategy: str, temperature: float) -> None:
    decoder = decoder_of(ToyAdapter(context=2), strategy)
    options = {"max_new_tokens": 25, "logprobs": 1, "stop": "éa", "temperature": temperature}
    one, other = decoder.stream(PROMPT, **options), decoder.stream(PROMPT, **options)
    chunks = list(one)
    assert asyncio.run(collect(other)) == chunks
    assert len(chunks) > 1
    assert other.result.tokens == one.result.tokens
    assert other.result.text == one.result.text == "".join(chunk.text for chunk in chunks)
    assert other.result.finish_reason == one.result.finish_reason == chunks[-1].finish_reason


def test_for_may_begin_and_async_for_go_on() -> None:
    model = ToyAdapter()
    expected = list(decoder_of(model).stream(PROMPT, max_new_tokens=12))
    stream = decoder_of(model).stream(PROMPT, max_new_tokens=12)
    chunks = [next(stream), next(stream)]
    assert chunks + asyncio.run(collect(stream)) == expected


@pytest.mark.parametrize("at", [0, 3])
def test_other_tasks_run_while_a_step_runs(at: int) -> None:
    model = Gated(at=at)
    stream = decoder_of(model, "autoregressive").stream(PROMPT, max_new_tokens=6)

    async def main() -> list[TextChunk]:
        task = asyncio.create_task(collect(stream))
        while not model.inside.is_set():
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(model.forwards) == at + 1  # the step is under way still
        assert not task.done()
        model.go.set()
        return await task

    chunks = asyncio.run(main())
    assert len(chunks) == 6
    assert stream.result.tokens == plain_decode(model, PROMPT, max_new_tokens=6)


def test_many_streams_in_one_event_loop() -> None:
    model = ToyAdapter(context=2)
    decoder = decoder_of(model, "lookahead")
    prompts = [[token] for token in range(V)]

    async def main() -> list[list[TextChunk]]:
        streams = [decoder.stream(prompt, max_new_tokens=15) for prompt in prompts]
        return await asyncio.gather(*(collect(stream) for stream in streams))

    for prompt, chunks in zip(prompts, asyncio.run(main()), strict=True):
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert tokens == plain_decode(model, prompt, max_new_tokens=15)


def test_an_error_in_a_step_reaches_async_for() -> None:
    class Broken(ToyAdapter):
        def logits_after(self, path: Sequence[int]) -> Tensor:
            return super().logits_after(path) * (torch.nan if len(path) > 7 else 1)

    decoder = decoder_of(Broken(), "autoregressive")
    stream = decoder.stream(PROMPT, max_new_tokens=9)
    chunks: list[TextChunk] = []
    with pytest.raises(GenerationError, match="NaN") as caught:
        asyncio.run(collect(stream, chunks))
    assert caught.value.step == 3
    assert len(chunks) == 3
    assert asyncio.run(collect(stream)) == []
    assert stream.result.tokens == plain_decode(ToyAdapter(), PROMPT, max_new_tokens=3)


# --- at the end ----------------------------------------------------------------------------------


def drained(stream: GenerationStream) -> None:
    """Check that nothing more comes, however it is asked for."""
    assert list(stream) == []
    assert next(stream, None) is None
    with pytest.raises(StopIteration):
        next(stream)
    assert asyncio.run(collect(stream)) == []


@pytest.mark.parametrize("count", [0, 1, 7])
def test_after_the_end_nothing_comes_and_nothing_is_run(count: int) -> None:
    model = ToyAdapter()
    stream = decoder_of(model).stream(PROMPT, max_new_tokens=count)
    list(stream)
    passes, result = len(model.forwards), stream.result
    drained(stream)
    stream.cancel()
    stream.close()
    drained(stream)
    assert len(model.forwards) == passes
    assert stream.result == result
    assert stream.run() == result
    assert result.finish_reason == "length"


def test_after_an_error_nothing_comes_and_the_result_stays() -> None:
    class Broken(ToyAdapter):
        def logits_after(self, path: Sequence[int]) -> Tensor:
            return super().logits_after(path) * (torch.nan if len(path) > 7 else 1)

    model = Broken()
    stream = decoder_of(model, "autoregressive").stream(PROMPT, max_new_tokens=9)
    with pytest.raises(GenerationError, match="NaN"):
        stream.run()
    passes = len(model.forwards)
    drained(stream)
    assert len(model.forwards) == passes
    assert stream.result.tokens == plain_decode(ToyAdapter(), PROMPT, max_new_tokens=3)
    assert stream.result.finish_reason == "cancelled"


def test_leaving_the_block_ends_the_stream() -> None:
    model = ToyAdapter()
    decoder = decoder_of(model, "autoregressive")
    with decoder.stream(PROMPT, max_new_tokens=9) as stream:
        next(stream)
        next(stream)
    drained(stream)
    assert len(model.forwards) == 2
    assert stream.result.finish_reason == "cancelled"
    with pytest.raises(ZeroDivisionError), decoder.stream(PROMPT) as stream:
        raise ZeroDivisionError
    drained(stream)


# --- cancelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_asyncio_task_may_be_cancelled_in_mid_step(at: int) -> None:
    model = Gated(at=at)
    decoder = decoder_of(model, "autoregressive")
    full = decoder_of(ToyAdapter(), "autoregressive").generate(PROMPT, max_new_tokens=9, logprobs=1)
    stream = decoder.stream(PROMPT, max_new_tokens=9, logprobs=1)
    chunks: list[TextChunk] = []

    async def main() -> GenerationResult:
        task = asyncio.create_task(collect(stream, chunks))
        await in_pass(model)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The decoder can be used at once, though the old pass is still under way.
        other = await asyncio.to_thread(decoder.generate, [7, 7], max_new_tokens=9)
        model.go.set()
        return other

    other = asyncio.run(main())
    assert other.tokens == plain_decode(model, [7, 7], max_new_tokens=9)
    assert len(chunks) == at
    stream.close()  # waits for the step, if it is not done yet
    passes = len(model.forwards)
    drained(stream)
    assert len(model.forwards) == passes
    result = stream.result
    assert result.finish_reason == "cancelled"
    # The step that was under way is in the result, whole or not at all.
    assert len(result.tokens) in {at, at + 1}
    assert result.tokens == full.tokens[: len(result.tokens)]
    assert result.text == TOKENIZER.decode(result.tokens).rstrip("\ufffd")
    assert result.logprobs == full.logprobs[: len(result.tokens)]
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == full.tokens


def test_a_task_that_is_cancelled_before_its_step_has_begun() -> None:
    """The pool of threads is busy, so that the step never starts."""
    model = ToyAdapter()
    decoder = decoder_of(model)
    streamer = Recorder()
    stream = decoder.stream(PROMPT, max_new_tokens=9, streamer=streamer)
    release = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool:
            loop.set_default_executor(pool)
            busy = loop.run_in_executor(None, release.wait, PATIENCE)
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release.set()
            await busy

    asyncio.run(main())
    stream.close()
    assert model.forwards == []
    assert stream.result.tokens == []
    assert streamer.ends == 1
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == plain_decode(
        model, PROMPT, max_new_tokens=9
    )


@pytest.mark.parametrize("at", range(4))
def test_cancel_from_another_thread_ends_after_the_pass_under_way(at: int) -> None:
    model = Gated(at=at)
    decoder = Decoder(model, TOKENIZER, strategy=Oracles(model))
    options = {"max_new_tokens": 40, "logprobs": 2}
    full = Decoder(ToyAdapter(), TOKENIZER, strategy=Oracles(model)).generate(PROMPT, **options)
    stream = decoder.stream(PROMPT, **options)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, stream)
        assert model.inside.wait(PATIENCE)
        stream.cancel()
        model.go.set()
        chunks = reading.result(PATIENCE)
    assert len(model.forwards) == at + 1
    assert len(chunks) == at + 1
    assert stream.result.finish_reason == "cancelled"
    assert all(chunk.finish_reason is None for chunk in chunks)
    assert len(stream.result.tokens) == 5 * (at + 1)
    check_prefix(stream.result, full, chunks)
    assert decoder.generate(PROMPT, **options).tokens == full.tokens


def test_cancel_in_the_last_pass_comes_too_late() -> None:
    model = Gated(at=3)
    stream = decoder_of(model, "autoregressive").stream(PROMPT, max_new_tokens=4)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, stream)
        assert model.inside.wait(PATIENCE)
        stream.cancel()
        model.go.set()
        chunks = reading.result(PATIENCE)
    assert chunks[-1].finish_reason == stream.result.finish_reason == "length"
    assert stream.result.tokens == plain_decode(model, PROMPT, max_new_tokens=4)


@pytest.mark.parametrize("count", [0, 2])
def test_cancel_between_two_steps_ends_at_once(count: int) -> None:
    """Nobody may ask for another step, and a reader of the streamer would wait for ever."""
    model = ToyAdapter()
    decoder = decoder_of(model, "autoregressive")
    streamer = Recorder()
    stream = decoder.stream(PROMPT, max_new_tokens=9, streamer=streamer)
    for _ in range(count):
        next(stream)
    stream.cancel()
    assert streamer.ends == 1
    # The memory is free for the next request, though the stream is not closed.
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == plain_decode(
        model, PROMPT, max_new_tokens=9
    )
    assert len(model.caches) == 1
    assert stream.result.tokens == plain_decode(model, PROMPT, max_new_tokens=count)


def test_cancel_before_the_first_step_runs_nothing() -> None:
    model = ToyAdapter()
    stream = decoder_of(model).stream(PROMPT, max_new_tokens=4)
    stream.cancel()
    stream.cancel()
    drained(stream)
    assert model.forwards == []
    assert (stream.result.tokens, stream.result.text) == ([], "")
    assert stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize("at", [0, 1, 5, 8])
@pytest.mark.parametrize("how", ["cancel", "close", "task"])
def test_a_long_prompt_is_given_up_between_two_chunks(at: int, how: str) -> None:
    model = Gated(at=at)
    decoder = decoder_of(model, "lookahead", prefill_chunk=2)
    prompt = PROMPT * 4
    stream = decoder.stream(prompt, max_new_tokens=9)

    async def main() -> None:
        task = asyncio.create_task(collect(stream))
        await in_pass(model)
        if how == "task":
            task.cancel()
            await asyncio.sleep(0.05)  # the task hears of it while the pass is still under way
        elif how == "cancel":
            stream.cancel()
        else:
            closing = asyncio.create_task(asyncio.to_thread(stream.close))
            await asyncio.sleep(0.05)
            assert not closing.done()
        model.go.set()
        try:
            assert await task == []
        except asyncio.CancelledError:
            assert how == "task"
        if how == "close":
            await closing

    asyncio.run(main())
    stream.close()
    assert len(model.forwards) == at + 1 < 10  # of ten
    assert stream.result.tokens == []
    assert stream.result.stats.steps == 0
    assert stream.result.finish_reason == "cancelled"
    # The half of a prompt that is in the cache is not met by the next request.
    result = decoder.generate(prompt, max_new_tokens=9)
    assert result.tokens == plain_decode(model, prompt, max_new_tokens=9)
    assert len(model.caches) == 1


def test_close_waits_for_the_step_of_another_thread() -> None:
    model = Gated(at=2)
    decoder = decoder_of(model, "autoregressive")
    stream = decoder.stream(PROMPT, max_new_tokens=9)
    events: list[str] = []

    def close() -> None:
        stream.close()
        events.append("closed")

    def read() -> list[TextChunk]:
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            events.append("chunk")
        return chunks

    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(read)
        assert model.inside.wait(PATIENCE)
        closing = pool.submit(close)
        time.sleep(0.1)
        assert not closing.done()
        assert events == ["chunk"] * 2
        model.go.set()
        closing.result(PATIENCE)
        chunks = reading.result(PATIENCE)
    assert sorted(events) == ["chunk"] * 3 + ["closed"]
    assert len(chunks) == 3
    assert len(model.forwards) == 3
    assert stream.result.tokens == plain_decode(model, PROMPT, max_new_tokens=3)
    assert stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": "<d>e"},
        {"stop": ["éé", "cab", "fe b"]},
        {"stop_token_ids": [[9, 9], [4, 0, 8], [2, 3, 5]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["autoregressive", "jacobi", "oracle"])
def test_a_text_that_is_cancelled_is_what_was_shown_and_the_start_of_the_whole(
    strategy: str, options: dict[str, Any]
) -> None:
    """Also where a character is incomplete, or where a stop has begun and may go on."""
    model = ToyAdapter()
    if strategy == "oracle":
        decoder = Decoder(model, TOKENIZER, strategy=Oracles(model))
    else:
        decoder = decoder_of(model, strategy)
    full = decoder.generate(PROMPT, max_new_tokens=40, logprobs=0, **options)
    for count in range(full.stats.steps):
        stream = decoder.stream(PROMPT, max_new_tokens=40, logprobs=0, **options)
        chunks = [next(stream) for _ in range(count)]
        stream.cancel()
        drained(stream)
        assert stream.result.finish_reason == "cancelled"
        check_prefix(stream.result, full, chunks)


# --- the result at any time ----------------------------------------------------------------------


def agrees(result: GenerationResult) -> bool:
    """Return whether text and tokens are of the same moment."""
    return result.text == TOKENIZER.decode(result.tokens).rstrip("\ufffd")


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_result_has_no_finish_reason_while_the_request_is_under_way(end: str) -> None:
    stream = decoder_of(ToyAdapter(), "autoregressive").stream(PROMPT, max_new_tokens=2)
    reasons = [stream.result.finish_reason]
    for _ in range(2):
        next(stream)
        reasons.append(stream.result.finish_reason)
    assert reasons == [None, None, "length"]
    stream = decoder_of(ToyAdapter(), "autoregressive").stream(PROMPT, max_new_tokens=2)
    next(stream)
    getattr(stream, end)()
    assert stream.result.finish_reason == "cancelled"


def test_the_result_between_two_chunks() -> None:
    model = ToyAdapter()
    stream = Decoder(model, TOKENIZER, strategy=Oracles(model)).stream(PROMPT, max_new_tokens=40)
    tokens: list[int] = []
    for chunk in stream:
        tokens += chunk.tokens
        assert stream.result.tokens == tokens
        assert agrees(stream.result)


def test_the_result_in_the_middle_of_a_step() -> None:
    """Another thread may ask at any time, for example while the cache is being moved."""
    seen: list[GenerationResult] = []

    class Watched(ToyCache):
        def commit(self, rows: Sequence[Sequence[int]]) -> None:
            seen.append(stream.result)
            super().commit(rows)

    class Model(ToyAdapter):
        def new_cache(self, *, batch: int, capacity: int) -> ToyCache:
            return Watched(batch=batch, capacity=capacity)

    model = Model()
    stream = Decoder(model, TOKENIZER, strategy=Oracles(model)).stream(PROMPT, max_new_tokens=40)
    stream.run()
    assert len(seen) == 8
    assert all(map(agrees, seen))
    assert {result.finish_reason for result in seen} == {None}


def test_the_result_after_an_error_in_the_middle_of_a_run() -> None:
    asked = 0

    def criterion(ids: Tensor, scores: None) -> bool:
        nonlocal asked
        asked += 1
        if asked == 13:  # the third token of the third run
            raise ZeroDivisionError
        return False

    model = ToyAdapter()
    stream = Decoder(model, TOKENIZER, strategy=Oracles(model)).stream(
        PROMPT, max_new_tokens=40, stopping_criteria=criterion
    )
    with pytest.raises(ZeroDivisionError):
        stream.run()
    assert len(stream.result.tokens) == 12
    assert agrees(stream.result)


# --- streamers -----------------------------------------------------------------------------------


class Recorder:
    """A streamer that keeps what it gets: the prompt as a row [1, L], then one run after another.

    Args:
        fail_at: Which run is refused, from 0; None for none.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        self.prompts: list[list[int]] = []
        self.runs: list[list[int]] = []
        self.ends = 0
        self.fail_at = fail_at

    def put(self, tokens: Tensor) -> None:
        assert self.ends == 0, "put after end"
        if not self.prompts:
            assert tokens.ndim == 2
            self.prompts += tokens.tolist()
            return
        if len(self.runs) == self.fail_at:
            raise BrokenPipeError
        assert tokens.ndim == 1
        self.runs.append(tokens.tolist())

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_gets_the_prompt_and_every_run_once_and_one_end() -> None:
    model = ToyAdapter()
    streamer = Recorder()
    decoder = Decoder(model, TOKENIZER, strategy=Oracles(model))
    result = decoder.generate(PROMPT, max_new_tokens=18, streamer=streamer)
    assert streamer.prompts == [PROMPT]
    assert [len(run) for run in streamer.runs] == [5, 5, 5, 3]
    assert [token for run in streamer.runs for token in run] == result.tokens
    assert streamer.ends == 1


@pytest.mark.parametrize("count", [0, 1])
def test_a_streamer_of_a_short_text(count: int) -> None:
    streamer = Recorder()
    decoder_of(ToyAdapter()).generate(PROMPT, max_new_tokens=count, streamer=streamer)
    assert (len(streamer.runs), streamer.ends) == (count, 1)


def use_to_the_end(stream: GenerationStream) -> None:
    list(stream)
    list(stream)
    stream.close()


def use_and_close(stream: GenerationStream) -> None:
    next(stream)
    stream.close()
    stream.close()
    list(stream)


def use_and_cancel(stream: GenerationStream) -> None:
    next(stream)
    stream.cancel()
    list(stream)
    list(stream)
    stream.close()


def never_begin(stream: GenerationStream) -> None:
    stream.close()
    list(stream)


def cancel_before_it_begins(stream: GenerationStream) -> None:
    stream.cancel()
    list(stream)
    list(stream)


def use_in_a_block(stream: GenerationStream) -> None:
    with stream:
        next(stream)


def use_in_two_loops(stream: GenerationStream) -> None:
    async def some() -> None:
        async for _ in stream:
            break

    asyncio.run(some())
    asyncio.run(collect(stream))
    stream.close()


@pytest.mark.parametrize(
    "use",
    [
        use_to_the_end,
        use_and_close,
        use_and_cancel,
        never_begin,
        cancel_before_it_begins,
        use_in_a_block,
        use_in_two_loops,
    ],
)
def test_a_streamer_is_ended_once_however_the_stream_is_used(
    use: Callable[[GenerationStream], None],
) -> None:
    streamer = Recorder()
    stream = decoder_of(ToyAdapter()).stream(PROMPT, max_new_tokens=9, streamer=streamer)
    use(stream)
    assert streamer.ends == 1
    assert [token for run in streamer.runs for token in run] == stream.result.tokens


def test_a_streamer_is_ended_once_on_an_error_of_the_model() -> None:
    class Broken(ToyAdapter):
        def logits_after(self, path: Sequence[int]) -> Tensor:
            return super().logits_after(path) * (torch.nan if len(path) > 7 else 1)

    streamer = Recorder()
    stream = decoder_of(Broken(), "autoregressive").stream(PROMPT, streamer=streamer)
    with pytest.raises(GenerationError, match="NaN"):
        stream.run()
    assert (len(streamer.runs), streamer.ends) == (3, 1)
    stream.close()
    assert streamer.ends == 1


@pytest.mark.parametrize(
    ("prompt", "options"), [([], {}), (PROMPT, {"top_p": 7}), ([PROMPT, PROMPT], {})]
)
def test_a_streamer_is_ended_when_its_request_is_refused(
    prompt: Any, options: dict[str, Any]
) -> None:
    """Whoever reads from it in another thread would wait for ever."""
    streamer = Recorder()
    with pytest.raises(DecodekitError):
        decoder_of(ToyAdapter()).stream(prompt, streamer=streamer, **options)
    assert (streamer.runs, streamer.ends) == ([], 1)


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_streamer_is_ended_once_on_an_error_of_its_own(fail_at: int) -> None:
    model = ToyAdapter()
    decoder = decoder_of(model, "autoregressive")
    streamer = Recorder(fail_at)
    stream = decoder.stream(PROMPT, max_new_tokens=9, streamer=streamer)
    with pytest.raises(BrokenPipeError):
        stream.run()
    assert (len(streamer.runs), streamer.ends) == (fail_at, 1)
    stream.close()
    assert streamer.ends == 1
    assert agrees(stream.result)
    assert len(stream.result.tokens) == fail_at + 1
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == plain_decode(
        model, PROMPT, max_new_tokens=9
    )


@pytest.mark.parametrize("method", ["put", "end"])
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_a_stop_iteration_of_a_streamer_is_no_end_of_the_text(
    error: type[Exception], method: str
) -> None:
    class Stopping(Recorder):
        def put(self, tokens: Tensor) -> None:
            super().put(tokens)
            if method == "put" and len(self.runs) == 3:
                raise error

        def end(self) -> None:
            super().end()
            if method == "end":
                raise error

    message = rf"{method}\(\) of the streamer Stopping raised {error.__name__}"
    for use in (list, lambda stream: asyncio.run(collect(stream)), GenerationStream.run):
        decoder, streamer = decoder_of(ToyAdapter(), "autoregressive"), Stopping()
        stream = decoder.stream(PROMPT, max_new_tokens=9, streamer=streamer)
        with pytest.raises(GenerationError, match=message):
            use(stream)
        assert streamer.ends == 1


def test_a_streamer_whose_end_fails_is_not_ended_again() -> None:
    class Failing(Recorder):
        def end(self) -> None:
            super().end()
            raise BrokenPipeError

    streamer = Failing()
    stream = decoder_of(ToyAdapter()).stream(PROMPT, max_new_tokens=4, streamer=streamer)
    with pytest.raises(BrokenPipeError):
        stream.run()
    stream.close()
    assert streamer.ends == 1
    assert stream.result.tokens == plain_decode(ToyAdapter(), PROMPT, max_new_tokens=4)


@pytest.mark.parametrize("method", ["close", "cancel"])
@pytest.mark.parametrize("place", ["streamer", "criterion"])
def test_a_stream_may_be_ended_from_within_its_own_step(place: str, method: str) -> None:
    """By the thread that runs the step, which cannot wait for itself."""
    model = ToyAdapter()
    decoder = Decoder(model, TOKENIZER, strategy=Oracles(model))

    class Ending(Recorder):
        def put(self, tokens: Tensor) -> None:
            super().put(tokens)
            if place == "streamer" and len(self.runs) == 2:
                getattr(stream, method)()

    def criterion(ids: Tensor, scores: None) -> bool:
        if place == "criterion" and ids.shape[1] == len(PROMPT) + 8:
            getattr(stream, method)()
        return False

    streamer = Ending()
    stream = decoder.stream(
        PROMPT, max_new_tokens=40, streamer=streamer, stopping_criteria=criterion
    )
    chunks = list(stream)
    assert len(chunks) == len(streamer.runs) == 2
    assert streamer.ends == 1
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.tokens == plain_decode(model, PROMPT, max_new_tokens=10)
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == stream.result.tokens[:9]


@pytest.mark.parametrize("how", ["task", "cancel"])
def test_a_streamer_is_ended_when_its_request_is_cancelled_in_mid_step(how: str) -> None:
    """Its reader waits in another thread and would wait for ever."""
    model = Gated(at=2)
    streamer = Recorder()
    stream = decoder_of(model, "autoregressive").stream(PROMPT, max_new_tokens=9, streamer=streamer)

    async def main() -> None:
        task = asyncio.create_task(collect(stream))
        await in_pass(model)
        if how == "task":
            task.cancel()
        else:
            stream.cancel()
        model.go.set()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if how == "task":
            assert isinstance(outcome, asyncio.CancelledError)
        else:
            assert len(outcome) == 3

    asyncio.run(main())  # and waits for the threads
    assert streamer.ends == 1
    stream.close()
    assert streamer.ends == 1
    assert [token for run in streamer.runs for token in run] == stream.result.tokens


@pytest.mark.parametrize("streamer", [object(), print, TextStreamer])
def test_what_is_no_streamer(streamer: Any) -> None:
    class OnlyPut:
        def put(self, tokens: Tensor) -> None: ...

    decoder = decoder_of(ToyAdapter())
    with pytest.raises(ConfigError, match=r"needs put\(tokens\) and end\(\); OnlyPut has no end"):
        decoder.stream(PROMPT, streamer=OnlyPut())
    if streamer is not TextStreamer:
        with pytest.raises(ConfigError, match=r"a streamer needs put\(tokens\) and end\(\)"):
            decoder.stream(PROMPT, streamer=streamer)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = save_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return Decoder.from_config(model=path, strategy="lookahead", max_new_tokens=30)


TEXT = "b c d e f"


@pytest.fixture(params=[False, True], ids=["skip_prompt=False", "skip_prompt=True"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a streamer of transformers."""
    return {"skip_prompt": request.param, "skip_special_tokens": True}


def shown(result: GenerationResult, tokenizer: Any, options: dict[str, Any]) -> str:
    """Return what a streamer with these options shows: the text, after the prompt or without."""
    prompt = [] if options["skip_prompt"] else result.prompt_tokens
    text = tokenizer.decode(prompt + result.tokens, skip_special_tokens=True)
    assert text.endswith(result.text)
    return text


def test_a_text_streamer_prints_exactly_the_text(
    real: Decoder, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    streamer = TextStreamer(real.tokenizer, **options)
    for prompt in (TEXT, "x y z"):  # one streamer may serve several requests
        result = real.generate(prompt, streamer=streamer)
        assert len(result.text) > 20
        assert capsys.readouterr().out == shown(result, real.tokenizer, options) + "\n"


def test_a_text_streamer_prints_what_it_prints_for_transformers(
    real: Decoder, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    streamer = TextStreamer(real.tokenizer, **options)
    ids = torch.tensor([real.generate(TEXT, streamer=streamer).prompt_tokens])
    ours = capsys.readouterr().out
    real.adapter.model.generate(ids, max_new_tokens=30, do_sample=False, streamer=streamer)
    assert capsys.readouterr().out == ours


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_text_streamer_prints_characters_of_several_tokens(
    strategy: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = decoder_of(ToyAdapter(context=2), strategy).generate(
        PROMPT, max_new_tokens=50, streamer=TextStreamer(TOKENIZER, **options)
    )
    assert capsys.readouterr().out == shown(result, TOKENIZER, options) + "\n"


def test_a_text_iterator_streamer_is_read_in_another_thread(
    real: Decoder, options: dict[str, Any]
) -> None:
    streamer = TextIteratorStreamer(real.tokenizer, timeout=PATIENCE, **options)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(real.generate, TEXT, streamer=streamer)
        text = "".join(streamer)
        assert text == shown(running.result(PATIENCE), real.tokenizer, options)
    assert streamer.text_queue.empty()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this streamer needs asyncio.timeout")
def test_an_async_text_iterator_streamer_is_read_in_the_event_loop(
    real: Decoder, options: dict[str, Any]
) -> None:
    async def main(run: Callable[[GenerationStream], Any]) -> tuple[str, str]:
        streamer = AsyncTextIteratorStreamer(real.tokenizer, timeout=PATIENCE, **options)
        stream = real.stream(TEXT, streamer=streamer)
        task = asyncio.create_task(run(stream))
        text = "".join([piece async for piece in streamer])
        await task
        assert streamer.text_queue.empty()
        return text, shown(stream.result, real.tokenizer, options)

    for run in (collect, lambda stream: asyncio.to_thread(stream.run)):
        text, expected = asyncio.run(main(run))
        assert text == expected != ""


@pytest.mark.parametrize("end", ["error", "cancel", "close", "task"])
def test_the_reader_of_an_iterator_streamer_does_not_wait_for_ever(end: str) -> None:
    class Model(Gated):
        def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
            logits = super().forward(plans, cache)
            if end == "error" and len(self.forwards) > self.at:
                raise GenerationError("the model is gone")
            return logits

    model = Model(at=3)
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=2)
    stream = decoder_of(model, "autoregressive").stream(PROMPT, max_new_tokens=9, streamer=streamer)

    async def main() -> str:
        reading = asyncio.create_task(asyncio.to_thread("".join, streamer))
        task = asyncio.create_task(collect(stream))
        await in_pass(model)
        closing = asyncio.create_task(asyncio.sleep(0))
        if end == "cancel":
            stream.cancel()
        elif end == "close":
            closing = asyncio.create_task(asyncio.to_thread(stream.close))
        elif end == "task":
            task.cancel()
        model.go.set()
        outcome, _ = await asyncio.gather(task, closing, return_exceptions=True)
        kinds = {"error": GenerationError, "task": asyncio.CancelledError}
        assert isinstance(outcome, kinds.get(end, list))
        return await reading

    text = asyncio.run(main())
    assert text == TOKENIZER.decode(stream.result.tokens)
    assert len(stream.result.tokens) == (3 if end == "error" else 4)


# --- threads -------------------------------------------------------------------------------------


class Meeting(ToyAdapter):
    """The first pass of a request waits for that of another: both are in mid-step at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.barrier = threading.Barrier(2)

    def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
        if plans[0].prefix == 0:
            self.barrier.wait(PATIENCE)
        return super().forward(plans, cache)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_threads_share_a_decoder(strategy: str) -> None:
    model = Meeting(context=2)
    decoder = decoder_of(model, strategy)
    prompts = [[first, second] for first in (1, 2) for second in range(V)]

    def work(mine: Sequence[list[int]]) -> list[list[int]]:
        return [decoder.generate(prompt, max_new_tokens=15).tokens for prompt in mine]

    with ThreadPoolExecutor(2) as pool:
        texts = [*pool.map(work, (prompts[:V], prompts[V:]))]
    for prompt, text in zip(prompts, texts[0] + texts[1], strict=True):
        assert text == plain_decode(model, prompt, max_new_tokens=15)
    assert len(decoder._idle) == len(model.caches) == 2


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_two_threads_share_a_real_model(kind: str) -> None:
    model = tiny_model(kind)
    decoder = Decoder.from_model(model, prefill_chunk=5)
    prompts = [random_prompt(length, seed=length) for length in range(1, 17)]

    def stream(prompt: list[int]) -> list[int]:
        chunks = asyncio.run(collect(decoder.stream(prompt, max_new_tokens=12)))
        return [token for chunk in chunks for token in chunk.tokens]

    def work(number: int) -> list[list[int]]:
        mine = prompts[number::2]
        if number:
            return [stream(prompt) for prompt in mine]
        return [result.tokens for result in decoder.generate(mine, max_new_tokens=12)]

    with ThreadPoolExecutor(2) as pool:
        texts = [*pool.map(work, (0, 1))]
    for number, group in enumerate(texts):
        for prompt, text in zip(prompts[number::2], group, strict=True):
            assert text == greedy_loop(model, prompt, 12)


def test_one_stream_read_by_two_threads_gives_each_run_to_one_of_them() -> None:
    model = ToyAdapter()
    expected = list(decoder_of(model, "autoregressive").stream(PROMPT, max_new_tokens=40))
    stream = decoder_of(model, "autoregressive").stream(PROMPT, max_new_tokens=40)
    with ThreadPoolExecutor(2) as pool:
        halves = [*pool.map(list, (stream, stream))]
    assert sorted(map(repr, halves[0] + halves[1])) == sorted(map(repr, expected))
    assert stream.result.tokens == plain_decode(model, PROMPT, max_new_tokens=40)


# --- memory --------------------------------------------------------------------------------------


class Forgetful(ToyAdapter):
    """A toy that keeps no record of its passes; now and then it breaks, if it is asked to."""

    broken = False

    def __init__(self) -> None:
        super().__init__(V, context=1)
        self.forwards = deque(maxlen=1)  # type: ignore[assignment]
        self.caches = deque(maxlen=1)  # type: ignore[assignment]

    def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
        if self.broken:
            raise GenerationError("out of order")
        return super().forward(plans, cache)


def requests(decoder: Decoder, round_number: int) -> None:
    """Make ten requests of every kind: ended, left, cancelled, failed, in batches, in tasks."""
    options = {"max_new_tokens": 5, "seed": round_number, "temperature": 1.0}
    decoder.generate(PROMPT, **options)
    decoder.generate([PROMPT, [1], [2, 3]], **options)
    asyncio.run(collect(decoder.stream(PROMPT, **options)))
    next(decoder.stream(PROMPT, **options))  # and is left
    decoder.stream(PROMPT, **options)  # never begun
    with decoder.stream(PROMPT, streamer=Recorder(), **options) as stream:
        next(stream)
    cancelled = decoder.stream([round_number % V] * 9, **options)
    next(cancelled)
    cancelled.cancel()
    cancelled.run()
    decoder.adapter.broken = True
    with pytest.raises(GenerationError, match="out of order"):
        decoder.generate(PROMPT, **options)
    decoder.adapter.broken = False
    with pytest.raises(GenerationError, match="outside the vocabulary"):
        decoder.generate([V])
    decoder.generate([round_number % V], logprobs=1, stop="ab", **options)


def traced() -> int:
    """Return the bytes that Python objects take, without the interpreter's own caches of names."""
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("strategy", ["prompt_lookup", "lookahead"])
def test_no_memory_grows_with_the_number_of_requests(strategy: str) -> None:
    if sys.gettrace() is not None:
        pytest.skip("what measures coverage takes memory of its own")
    decoder = decoder_of(Forgetful(), strategy, prefill_chunk=4)
    requests(decoder, 0)
    tracemalloc.start()
    try:
        requests(decoder, 1)
        before = traced()
        for number in range(50):
            requests(decoder, number)
            assert len(decoder._idle) <= 1
        grown = traced() - before
    finally:
        tracemalloc.stop()
    assert grown < 5_000  # ten bytes a request


def test_idle_caches_are_as_many_as_requests_were_open_at_once() -> None:
    model = ToyAdapter()
    decoder = decoder_of(model)
    for _ in range(50):
        streams = [decoder.stream(PROMPT, max_new_tokens=4) for _ in range(4)]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.run()
    assert len(decoder._idle) == len(model.caches) == 4


def test_a_streamer_is_ended_when_nobody_holds_its_stream_any_more() -> None:
    streamer = Recorder()
    stream = decoder_of(ToyAdapter()).stream(PROMPT, max_new_tokens=9, streamer=streamer)
    next(stream)
    assert streamer.ends == 0
    del stream
    gc.collect()
    assert streamer.ends == 1


def test_a_stream_can_be_closed_in_a_coroutine() -> None:
    async def main() -> str:
        stream = decoder_of(ToyAdapter()).stream(PROMPT, max_new_tokens=9)
        async with contextlib.aclosing(stream):
            await anext(stream)
        assert [chunk async for chunk in stream] == []
        return stream.result.finish_reason

    assert asyncio.run(main()) == "cancelled"
