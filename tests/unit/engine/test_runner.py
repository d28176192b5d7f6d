"""Running plans: chunks, batches, what is kept, and memory that is taken again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decodekit.engine.runner import LocalRunner
from decodekit.errors import ConfigError
from decodekit.interfaces import ModelAdapter
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree
from tests.support.fakes import ToyAdapter

BUSH = TokenTree((1, 2, 3, 1), (ROOT, ROOT, 0, 2))
PROMPT = tuple(number * 5 % 11 for number in range(23))


def started(
    adapter: ToyAdapter, *, batch: int = 1, capacity: int = 64, chunk: int = 512
) -> LocalRunner:
    runner = LocalRunner(adapter, prefill_chunk=chunk)
    runner.start(batch=batch, capacity=capacity)
    return runner


def true_logits(adapter: ToyAdapter, tokens: tuple[int, ...], tree: TokenTree) -> Tensor:
    nodes = (ROOT, *range(len(tree)))
    return torch.stack([adapter.logits_after(tokens + tree.path_tokens(node)) for node in nodes])


def prefixes(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tokens[: end + 1] for end in range(len(tokens))]


def test_the_toy_is_a_model_adapter() -> None:
    assert isinstance(ToyAdapter(), ModelAdapter)


@pytest.mark.parametrize("chunk", [1, 2, 7, 22, 23, 24, 512])
@pytest.mark.parametrize("tree", [TokenTree(), BUSH], ids=["empty tree", "tree"])
def test_chunks_change_nothing_but_the_size_of_a_pass(chunk: int, tree: TokenTree) -> None:
    adapter = ToyAdapter()
    runner = started(adapter, chunk=chunk)
    (logits,) = runner.run([StepPlan(0, PROMPT, tree)])
    assert torch.equal(logits, true_logits(adapter, PROMPT, tree))
    pending = [len(plans[0].pending) for plans in adapter.forwards]
    assert pending == [chunk] * (-(-len(PROMPT) // chunk) - 1) + [(len(PROMPT) - 1) % chunk + 1]
    assert [len(plans[0].tree) for plans in adapter.forwards[:-1]] == [0] * (len(pending) - 1)
    runner.commit([[0, 2]] if tree else [[]])
    kept = PROMPT + ((1, 3) if tree else ())
    assert adapter.caches[0].rows[0] == prefixes(kept)
    # And the next step goes on from there.
    (logits,) = runner.run([StepPlan(len(kept), (4,), BUSH)])
    assert torch.equal(logits, true_logits(adapter, (*kept, 4), BUSH))


@pytest.mark.parametrize("chunk", [1, 3, 5, 512])
def test_a_ragged_batch_equals_single_runs(chunk: int) -> None:
    adapter = ToyAdapter()
    runner = started(adapter, batch=3, chunk=chunk)
    prompts = [PROMPT[:2], PROMPT[:11], PROMPT[3:4]]
    trees = [BUSH, TokenTree(), TokenTree.chain([5, 6])]
    keep = [[1], [], [0, 1]]
    plans = [StepPlan(0, prompt, tree) for prompt, tree in zip(prompts, trees, strict=True)]
    for logits, prompt, tree in zip(runner.run(plans), prompts, trees, strict=True):
        assert torch.equal(logits, true_logits(adapter, prompt, tree))
    runner.commit(keep)
    texts = [
        prompt + tuple(tree.tokens[node] for node in nodes)
        for prompt, tree, nodes in zip(prompts, trees, keep, strict=True)
    ]
    assert adapter.caches[0].rows == [prefixes(text) for text in texts]
    # A second step: one sequence has much to catch up with, the others do not.
    more = [(1,), (2,), PROMPT[:9]]
    plans = [StepPlan(len(text), new, BUSH) for text, new in zip(texts, more, strict=True)]
    for logits, text, new in zip(runner.run(plans), texts, more, strict=True):
        assert torch.equal(logits, true_logits(adapter, text + new, BUSH))


def test_a_sequence_that_is_done_waits_with_one_row() -> None:
    adapter = ToyAdapter()
    runner = started(adapter, batch=2, chunk=4)
    runner.run([StepPlan(0, PROMPT[:3]), StepPlan(0, PROMPT[:9], BUSH)])
    assert [[plan.rows for plan in plans] for plans in adapter.forwards] == [[1, 4], [1, 4], [3, 5]]


def test_what_is_not_committed_is_lost() -> None:
    adapter = ToyAdapter()
    runner = started(adapter)
    runner.run([StepPlan(0, (1, 2), BUSH)])
    runner.commit([[]])
    assert runner.cache.lengths == (2,)
    runner.run([StepPlan(2, (3,), BUSH)])
    runner.commit([[1]])
    assert adapter.caches[0].rows[0] == prefixes((1, 2, 3, 2))


def test_memory_is_taken_again_if_it_is_enough() -> None:
    adapter = ToyAdapter()
    runner = started(adapter, capacity=10)
    runner.run([StepPlan(0, (1, 2))])
    runner.commit([[]])
    first = runner.cache
    runner.start(capacity=10)
    assert runner.cache is first
    assert first.lengths == (0,)
    runner.start(capacity=4)
    assert runner.cache is first
    runner.start(capacity=11)
    assert runner.cache is not first
    assert (runner.cache.capacity, runner.cache.lengths) == (11, (0,))
    second = runner.cache
    runner.start(batch=2, capacity=5)
    assert runner.cache is not second
    assert runner.cache.lengths == (0, 0)


def test_a_failed_allocation_leaves_no_old_cache_behind() -> None:
    adapter = ToyAdapter()
    runner = started(adapter, capacity=4)

    def refuse(*, batch: int, capacity: int) -> None:
        raise MemoryError

    adapter.new_cache = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(MemoryError):
        runner.start(capacity=5)
    del adapter.new_cache
    runner.start(capacity=3)
    assert runner.cache.capacity == 3  # made anew: the old memory was let go


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_of_nothing_is_refused(chunk: int) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalRunner(ToyAdapter(), prefill_chunk=chunk)
    assert str(caught.value) == f"prefill_chunk must be 1 or more, not {chunk}"
    assert (caught.value.key, caught.value.value) == ("prefill_chunk", chunk)
