"""The ``flex`` backend: how often it compiles, what it is handed, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from decodekit import Decoder
from decodekit.backends import flex
from decodekit.backends.eager import EagerBackend
from decodekit.backends.flex import FlexBackend, _block_runs, _rounded
from decodekit.errors import BackendError
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree
from tests.support.attention import assert_close, attend, random_states
from tests.support.tiny import greedy_loop, random_prompt, tiny_model


def comb(prefix: int, nodes: int) -> TreeMask:
    """Return the mask of a step with ``nodes`` guesses, every other one a sibling."""
    tree = TokenTree((0,) * nodes, tuple(node - 1 - node % 2 for node in range(nodes)))
    return StepPlan(prefix, (0,), tree).mask()


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Count what is compiled, and run it without a C++ compiler's minutes."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    yield counter
    torch._dynamo.reset()


def test_200_steps_compile_a_handful_of_times(counter: CompileCounterWithBackend) -> None:
    backend = FlexBackend()
    for step in range(200):
        mask = comb(prefix=20 + step, nodes=(7 * step) % 60)
        states = random_states([mask], (4, 2), torch.float32, step, dim=8)
        actual = attend(backend, [mask], states, window=30 if step % 2 else None)
        if step % 40 == 0:
            assert_close(actual, attend(EagerBackend(), [mask], states), torch.float32)
    # 16, 32 or 64 rows on 256 keys, then 64 on 512; the window is a number and no code.
    assert counter.frame_count == 4


def test_a_decoder_compiles_a_handful_of_times(counter: CompileCounterWithBackend) -> None:
    model = tiny_model("mistral")
    prompt = random_prompt(20)
    decoder = Decoder.from_model(model, strategy="lookahead", backend="flex")
    result = decoder.generate(prompt, max_new_tokens=40)
    assert result.tokens == greedy_loop(model, prompt, 40)
    assert result.stats.steps > 10
    assert 1 <= counter.frame_count <= 4


def test_more_sizes_than_torch_compiles_by_itself(counter: CompileCounterWithBackend) -> None:
    backend = FlexBackend()
    for heads in range(1, 11):
        mask = comb(prefix=3, nodes=2)
        states = random_states([mask], (heads, 1), torch.float32, dim=8)
        attend(backend, [mask], states)
    assert counter.frame_count == 10 > torch._dynamo.config.recompile_limit


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_compiled_to_machine_code_it_equals_eager() -> None:
    torch._dynamo.reset()
    backend = FlexBackend()
    for prefix, nodes in ((0, 9), (150, 4), (245, 3)):
        masks = [comb(prefix, nodes), comb(prefix // 2, nodes // 2)]
        states = random_states(masks, (4, 2), torch.float32, dim=16, spare=3)
        for window in (None, 7):
            options: dict[str, Any] = {"window": window, "softcap": 5.0}
            actual = attend(backend, masks, states, **options)
            expected = attend(EagerBackend(), masks, states, **options)
            for index, mask in enumerate(masks):
                pair = actual[index, : mask.rows], expected[index, : mask.rows]
                assert_close(*pair, torch.float32)
    torch._dynamo.reset()


def test_the_hf_adapter_hands_over_rounded_views_and_copies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    padded: list[int] = []
    monkeypatch.setattr(flex, "pad", lambda x, by: (padded.append(by[3]), x)[1])
    seen: list[tuple[int, int]] = []
    real = FlexBackend.attend

    def watched(self: FlexBackend, q: Any, key: Any, v: Any, lowered: Any, **options: Any) -> Any:
        seen.append((key.shape[2], key.untyped_storage().nbytes()))
        padded.clear()
        query = torch.nn.functional.pad(q, (0, 0, 0, lowered.rows - q.shape[2]))
        output = real(self, query, key, v, lowered, **options)
        assert padded == []
        return output[:, : q.shape[2]]

    monkeypatch.setattr(FlexBackend, "attend", watched)
    settings = {"name": "flex", "compile": False}
    decoder = Decoder.from_model(tiny_model(), strategy="jacobi", backend=settings)
    decoder.generate(random_prompt(30), max_new_tokens=20)
    assert {rows for rows, _ in seen} == {256}
    cache = decoder.adapter.new_cache(batch=1, capacity=300)
    assert cache.capacity == 300  # rows are promised as before, whatever is allocated


def test_sizes_are_rounded_up_and_do_not_fall() -> None:
    assert [_rounded(n, 16) for n in (1, 16, 17, 32, 33, 120)] == [16, 16, 32, 32, 64, 128]
    rounded = [FlexBackend().key_rows(rows) for rows in range(1, 5000)]
    assert all(rows <= more for rows, more in enumerate(rounded, start=1))
    assert rounded == sorted(rounded)
    assert len(set(rounded)) == 6


def test_blocks_of_keys_are_left_out_or_seen_whole() -> None:
    assert _block_runs(comb(500, 3), None) == (0, 3, 4)
    assert _block_runs(comb(500, 3), 10_000) == (0, 3, 4)
    assert _block_runs(comb(500, 3), 200) == (2, 2, 4)  # from place 301 on
    assert _block_runs(comb(0, 3), 1) == (0, 0, 1)


def test_what_cannot_be_compiled_for_a_cpu_is_refused() -> None:
    with pytest.raises(BackendError, match="not compiled for float64 on a CPU; use back"):
        Decoder.from_model(tiny_model(dtype=torch.float64), backend="flex")
    mask = comb(3, 2)
    states = random_states([mask], (2, 2), torch.float32, dim=8)
    with pytest.raises(BackendError, match="attention sinks when compiled for a CPU; us"):
        attend(FlexBackend(), [mask], states, sinks=torch.zeros(2))


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise OSError("no C++ compiler\nand more")

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend=broken, fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    mask = comb(3, 2)
    states = random_states([mask], (2, 2), torch.float32, dim=8)
    with pytest.raises(
        BackendError,
        match=r"^backend 'flex' cannot be compiled here \(no C\+\+ compiler and more\); use",
    ):
        attend(FlexBackend(), [mask], states)
    torch._dynamo.reset()
