"""What a row must not see does not move it: tokens of others, and memory that holds no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from decodekit.interfaces.adapter import KVCache
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.testing.laws import law
from decodekit.testing.storage import poison, tensors_of
from decodekit.testing.subject import Subject

__all__ = ["check_memory", "check_unseen_tokens"]

_MEMORY = "memory that holds no committed row is not read"
_JUNK = 100.0  # finite: what is behind the rows of a shorter sequence is masked, not left out
_CAPACITY = 40


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a step: its committed tokens, the last of them pending, and its guesses."""

    text: tuple[int, ...]
    prefix: int
    tree: TokenTree

    @property
    def plan(self) -> StepPlan:
        return StepPlan(self.prefix, self.text[self.prefix :], self.tree)

    def changed(self, place: int, vocab_size: int) -> _Sequence:
        """Return it with another token in one place; those of nodes come after the text's."""
        tokens = [*self.text, *self.tree.tokens]
        tokens[place] = (tokens[place] + 1 + vocab_size // 2) % vocab_size
        text, nodes = tokens[: len(self.text)], tokens[len(self.text) :]
        return replace(self, text=tuple(text), tree=TokenTree(tuple(nodes), self.tree.parents))

    def sees(self, node: int, place: int) -> bool:
        """Return whether a row may see the token in a place."""
        changed = place - len(self.text)
        return changed < 0 or (node != ROOT and changed in self.tree.path(node))


def check_unseen_tokens(subject: Subject) -> None:
    """Change one token after the other in a ragged batch: only rows that may see it move.

    The three sequences of the pass have other prefixes, pending tokens and trees each. Guesses
    change, pending tokens and committed ones.
    """
    batch = _ragged_batch(subject)
    cache = _filled(subject, batch)
    before = _run(subject, cache, batch)
    for index, sequence in enumerate(batch):
        end = len(sequence.text)
        for place in sorted({0, end - 1, *range(end, end + len(sequence.tree), 2)}):
            other = list(batch)
            other[index] = sequence.changed(place, subject.adapter.vocab_size)
            committed = place < sequence.prefix
            after = _run(subject, _filled(subject, other) if committed else cache, other)
            where = f"token {place} of sequence {index} changed, in {batch}"
            own = place - end if place >= end else ROOT
            if place >= end - 1:
                gap = float((after[index][own + 1] - before[index][own + 1]).abs().max())
                law(gap > 0, "a row moves with its own token", where)
            for row, node in (
                (row, node)
                for row, one in enumerate(batch)
                for node in range(ROOT, len(one.tree))
                if row != index or not one.sees(node, place)
            ):
                subject.close(
                    after[row][node + 1],
                    before[row][node + 1],
                    "a row does not move with a token that it must not see",
                    f"node {node} of sequence {row}; {where}",
                )


def check_memory(
    subject: Subject, storage: Callable[[KVCache], Iterable[Tensor]] | None = None
) -> None:
    """Fill all memory that holds no committed row: it must not be read.

    It is NaN for one sequence. In a ragged batch it is finite: a kernel reads what is behind the
    rows of a shorter sequence, and must hide it.

    Args:
        subject: The adapter.
        storage: The tensors in which a cache keeps rows; None looks for them in its attributes.
    """

    def filled(cache: KVCache, value: float) -> None:
        found = storage(cache) if storage else tensors_of(cache, apart_from=subject.adapter)
        poison(list(found), value)

    text = subject.tokens(10)
    cache = subject.prefilled(text, capacity=24)
    subject.run(cache, [StepPlan(10, tuple(text[:3]))])
    cache.reset()
    filled(cache, float("nan"))
    tree = subject.tree(8, after=10, depth=9)
    for plan in (StepPlan(0, tuple(text[:9])), StepPlan(9, (text[9],), tree)):
        logits = subject.run(cache, [plan], name=_MEMORY)
        subject.close(
            logits[0][0],
            subject.alone(text[: plan.prefix + len(plan.pending)]),
            _MEMORY,
            f"all of it was NaN; {plan}",
        )
        cache.commit([range(len(plan.pending))])
    batch = _ragged_batch(subject)
    cache = _filled(subject, batch)
    _run(subject, cache, batch)
    cache.reset()
    filled(cache, _JUNK)
    _fill(subject, cache, batch)
    for sequence, rows in zip(batch, _run(subject, cache, batch), strict=True):
        for node in range(ROOT, len(sequence.tree)):
            path = () if node == ROOT else sequence.tree.path_tokens(node)
            subject.close(
                rows[node + 1],
                subject.alone([*sequence.text, *path]),
                _MEMORY,
                f"all of it was {_JUNK}; node {node} of {sequence} in {batch}",
            )


def _ragged_batch(subject: Subject) -> list[_Sequence]:
    sizes = ((4, 3, 7), (1, 0, 3), (13, 9, 9))  # tokens of the text, of its prefix, nodes
    return [
        _Sequence(tuple(subject.tokens(length)), prefix, subject.tree(nodes, after=length))
        for length, prefix, nodes in sizes
    ]


def _filled(subject: Subject, batch: list[_Sequence]) -> KVCache:
    """Return a cache that holds the prefixes of a batch."""
    cache = subject.new_cache(batch=len(batch), capacity=_CAPACITY)
    _fill(subject, cache, batch)
    return cache


def _fill(subject: Subject, cache: KVCache, batch: list[_Sequence]) -> None:
    # An empty prefix has no row to run, so another token is run there and is not kept.
    plans = [StepPlan(0, one.text[: one.prefix] or one.text[:1]) for one in batch]
    subject.run(cache, plans)
    cache.commit([range(one.prefix) for one in batch])


def _run(subject: Subject, cache: KVCache, batch: list[_Sequence]) -> list[Tensor]:
    return subject.run(cache, [one.plan for one in batch])
