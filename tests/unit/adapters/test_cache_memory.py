"""The memory of a cache follows the text, and what is in it does not change when it moves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from decodekit import Decoder
from decodekit.adapters.cache_memory import RowStorage
from decodekit.decoder.build import build_adapter
from decodekit.errors import GenerationError
from decodekit.interfaces.plan import StepPlan
from tests.support.native import native_model, needs_compiler
from tests.support.tiny import greedy_loop, random_prompt, tiny_model

CPU = torch.device("cpu")


def storage(capacity: int, *, batch: int = 1, **more: Any) -> RowStorage:
    made = RowStorage(batch=batch, capacity=capacity, **more)
    made.begin([1] * batch)
    made.add_slab(2, heads=1, dim=4, dtype=torch.float32, device=CPU)
    return made


def held(rows: RowStorage) -> int:
    return rows.slabs[0].shape[3]


def append(rows: RowStorage, *counts: int) -> None:
    """Write rows that are told apart by their number, and commit them."""
    rows.begin(counts)
    width = max(counts)
    for slab in rows.slabs:
        states = torch.zeros(len(counts), 1, width, 4)
        for index, (start, count) in enumerate(zip(rows.lengths, counts, strict=True)):
            states[index, :, :count] = (1 + start + torch.arange(count))[:, None]
        for place in slab:
            rows.write(place, states)
    rows.commit([range(count) for count in counts])


def test_memory_is_taken_in_pieces_and_holds_what_was_written() -> None:
    rows = storage(100_000, batch=2)
    sizes = {held(rows)}
    while max(rows.lengths) < 5000:
        append(rows, 200, 7)
        sizes.add(held(rows))
    assert sorted(sizes) == [1024, 1536, 2304, 3584, 5376]
    for index, length in enumerate(rows.lengths):
        for place in rows.slabs[0]:
            expected = 1 + torch.arange(length, dtype=torch.float32)
            assert torch.equal(place[index, 0, :length, 3], expected)
    assert not rows.slabs[0].isnan().any()
    assert float(rows.slabs[0][:, :, :, max(rows.lengths) :].abs().sum()) == 0


@pytest.mark.parametrize("capacity", [3, 700, 1024, 1100])
def test_never_more_than_the_capacity(capacity: int) -> None:
    rows = storage(capacity, key_rows=lambda count: -(-count // 128) * 128)
    append(rows, capacity)
    assert held(rows) == -(-capacity // 128) * 128
    with pytest.raises(GenerationError, match=f"1 rows do not fit behind {capacity}"):
        rows.begin([1])


def test_memory_of_a_giant_text_goes_after_a_small_one() -> None:
    rows = storage(100_000)
    append(rows, 20_000)
    rows.reset()
    for expected in (20_224, 1024, 1024):
        append(rows, 50)
        assert held(rows) == expected
        rows.reset()
    append(rows, 4000)
    rows.reset()
    append(rows, 3000)  # of like size: it stays where it is
    moves = rows.moves
    rows.reset()
    append(rows, 3000)
    assert rows.moves == moves
    assert torch.equal(rows.slabs[0][0, 0, 0, :3000, 0], 1 + torch.arange(3000.0))


def test_memory_that_passes_were_recorded_over_is_taken_at_once_and_stays() -> None:
    rows = storage(5000, spare=1)
    (slab,) = rows.slabs
    assert held(rows) == 5001
    append(rows, 4000)
    rows.reset()
    append(rows, 1)
    rows.reset()
    append(rows, 1)
    assert rows.slabs[0] is slab


def test_what_can_never_be_held_is_refused_before_anything_is_taken() -> None:
    rows = RowStorage(batch=1, capacity=2**45)
    rows.begin([1])
    with pytest.raises(GenerationError, match=f"no memory for a cache of {2**45} rows; lower max"):
        rows.add_slab(2, heads=1, dim=4, dtype=torch.float32, device=CPU)
    assert rows.slabs == []


def test_a_move_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = storage(9000)
    rows.add_slab(1, heads=1, dim=4, dtype=torch.float32, device=CPU)
    append(rows, 1000)
    before = list(rows.slabs)
    original, calls = torch.empty, []

    def fail(*shape: Any, **more: Any) -> torch.Tensor:
        calls.append(shape)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no more")
        return original(*shape, **more)

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(GenerationError, match="no memory for a cache of 1536 rows"):
        rows.begin([100])
    assert all(now is then for now, then in zip(rows.slabs, before, strict=True))
    append(rows, 100)
    assert held(rows) == 1536


@pytest.mark.parametrize("kind", ["llama", "gemma2", "deepseek_v2"])
@pytest.mark.parametrize("adapter", ["hf", "auto"])
def test_logits_are_the_same_when_the_cache_moves(
    kind: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a ragged batch."""
    model = tiny_model(kind)
    texts = [random_prompt(60, seed=1), random_prompt(9, seed=2)]

    def logits(first: int) -> list[torch.Tensor]:
        monkeypatch.setattr("decodekit.adapters.cache_memory._FIRST", first)
        monkeypatch.setattr("decodekit.adapters.cache_memory._STEP", 8)
        built = build_adapter(model, adapter=adapter, backend="eager")
        cache = built.new_cache(batch=2, capacity=100)
        found = []
        for start in range(0, 60, 5):
            plans = [
                StepPlan(length, tuple(text[start : start + 5]) or (5,))
                for text, length in zip(texts, cache.lengths, strict=True)
            ]
            found += built.forward(plans, cache)
            cache.commit([range(len(plan.pending)) for plan in plans])
        return found

    for moved, still in zip(logits(8), logits(1024), strict=True):
        assert torch.equal(moved, still)


@needs_compiler
def test_native_passes_follow_a_cache_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodekit.adapters.cache_memory._FIRST", 8)
    monkeypatch.setattr("decodekit.adapters.cache_memory._STEP", 4)
    decoder = Decoder.from_model(native_model(), strategy="lookahead", execution="native")
    prompts = [random_prompt(11, seed=3), random_prompt(4, seed=4)]
    expected = [greedy_loop(native_model(), prompt, 60) for prompt in prompts]
    results = decoder.generate(prompts, max_new_tokens=60)
    assert [result.tokens for result in results] == expected


def test_long_answers_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodekit.adapters.cache_memory._FIRST", 8)
    monkeypatch.setattr("decodekit.adapters.cache_memory._STEP", 4)
    model = tiny_model("llama")
    prompts = [random_prompt(11, seed=3), random_prompt(4, seed=4)]
    expected = [greedy_loop(model, prompt, 60) for prompt in prompts]
    for adapter in ("hf", "llama"):
        decoder = Decoder.from_model(model, adapter=adapter, strategy="lookahead")
        for _ in range(2):  # also in the memory of the last answers
            results = decoder.generate(prompts, max_new_tokens=60)
            assert [result.tokens for result in results] == expected


_RESIDENT = """
from transformers import LlamaConfig, LlamaForCausalLM
from decodekit import Decoder

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

config = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=8,
    num_attention_heads=4, max_position_embeddings=40_000, eos_token_id=None, bos_token_id=None)
model = LlamaForCausalLM(config).eval()
for adapter in ("hf", "llama"):
    decoder = Decoder.from_model(model, adapter=adapter, strategy="autoregressive")
    decoder.generate([1, 2, 3], max_new_tokens=24)
    before = resident()
    for step, record in enumerate(decoder.stream([1, 2, 3], max_new_tokens=32_000)):
        if step == 24:
            break
    print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_short_answer_does_not_take_the_memory_of_the_longest() -> None:
    """32,000 rows of this model are 500 MiB; 1,024 are 16."""
    command = [sys.executable, "-c", _RESIDENT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    more = [float(line) for line in done.stdout.split()]
    assert len(more) == 2
    assert max(more) < 60
