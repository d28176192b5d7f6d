"""``check_adapter``: the built-in adapter passes, and each law catches one that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.hf.cache import HFCache
from decodekit.backends.sdpa import SDPABackend
from decodekit.decoder.build import build_adapter
from decodekit.interfaces.plan import StepPlan
from decodekit.testing import ToyAdapter, check_adapter
from decodekit.testing.toy import ToyCache
from tests.support.tiny import logits_after, tiny_model


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("mistral", "sdpa"),
        ("qwen2", "eager"),
        ("gemma2", "eager"),
        ("gpt2", "sdpa"),
    ],
)
def test_the_built_in_adapter_keeps_every_law(kind: str, backend: str) -> None:
    model = tiny_model(kind)
    adapter = build_adapter(model, backend=backend)
    check_adapter(adapter, reference=lambda tokens: logits_after(model, tokens))


def test_an_adapter_that_is_wrong_everywhere_alike_is_found_out_by_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared with itself it keeps every law, and nobody gave a reference."""

    class Biased(HFAdapter):
        def forward(self, plans: Any, cache: Any) -> list[Tensor]:
            logits = super().forward(plans, cache)
            return [rows + torch.arange(rows.shape[-1]) / 50 for rows in logits]

    monkeypatch.setattr("decodekit.adapters.hf.adapter.check_agreement", lambda *_: None)
    with pytest.raises(AssertionError, match="a chain has the model's logits"):
        check_adapter(Biased(tiny_model(), SDPABackend()))


def test_the_toy_model_keeps_every_law() -> None:
    toy = ToyAdapter(max_positions=60, eos=[3])
    check_adapter(toy, reference=toy.logits_after, seed=1)


Forward = Callable[[ToyAdapter, Sequence[StepPlan], Any, list[Tensor]], list[Tensor]]


def late_chunks_wrong(
    model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]
) -> list[Tensor]:
    """Right, but for a chunk of four tokens or more behind a prefix."""
    return [
        rows + 0.01 * (plan.prefix > 0 and len(plan.pending) > 3 and len(plan.tree) == 0)
        for plan, rows in zip(plans, logits, strict=True)
    ]


def reads_memory(model: ToyAdapter, plans: Any, cache: Any, logits: list[Tensor]) -> list[Tensor]:
    return [rows + 0 * cache.memory[0]["deep"][0].sum() for rows in logits]


def leaks(model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]) -> list[Tensor]:
    """Guesses of the first sequence show in the others, once there is much in the cache."""
    if len(plans) == 3 and plans[2].prefix >= 9:
        return [logits[0], *(rows + 0.001 * plans[0].tokens[-1] for rows in logits[1:])]
    return logits


def reads_batches(model: ToyAdapter, plans: Any, cache: Any, logits: list[Tensor]) -> list[Tensor]:
    """Reads memory where no row is, but only of a batch."""
    total = cache.memory[0]["deep"][0].sum()
    return [rows + total for rows in logits] if len(plans) > 1 else logits


class BlindToItself(ToyAdapter):
    """A model whose logits depend on all tokens but the last."""

    def logits_after(self, path: Sequence[int]) -> Tensor:
        return super().logits_after(path[:-1])


class WithHorizon(ToyAdapter):
    """A model with another half from position 30 on, which is right in one pass only."""

    near = 30

    def horizon(self, length: int) -> int | None:
        return self.near if length <= self.near else None

    def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
        wrong = [0 < p.prefix < 30 <= p.positions[p.anchor_row] for p in plans]
        logits = super().forward(plans, cache)
        return [rows + 0.01 * far for rows, far in zip(logits, wrong, strict=True)]


class NearHorizon(WithHorizon):
    near = 8


class Changed(ToyAdapter):
    """A toy model whose logits are changed before anybody sees them."""

    def __init__(self, change: Forward, **options: Any) -> None:
        super().__init__(**options)
        self.change = change

    def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
        return self.change(self, plans, cache, super().forward(plans, cache))


class WithCache(ToyAdapter):
    """A toy model with another cache."""

    def __init__(self, kind: type[ToyCache], **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def new_cache(self, *, batch: int, capacity: int) -> ToyCache:
        return self.kind(batch=batch, capacity=capacity)


class KeepsTheFirstSequences(ToyCache):
    def keep(self, sequences: Sequence[int]) -> None:
        super().keep(range(len(sequences)))


class KeepsAll(ToyCache):
    def keep(self, sequences: Sequence[int]) -> None:
        pass


class NeverForgets(ToyCache):
    def reset(self) -> None:
        if not self.rows:
            super().reset()


class LosesSequences(ToyCache):
    def reset(self) -> None:
        self.batch = len(self.rows) or self.batch
        super().reset()


class Smaller(ToyCache):
    def __init__(self, *, batch: int, capacity: int) -> None:
        super().__init__(batch=batch, capacity=capacity)
        self.capacity = capacity // 2 + 60


class Endless(ToyCache):
    """Has a number for a capacity that nobody heeds."""

    def __init__(self, *, batch: int, capacity: int) -> None:
        super().__init__(batch=batch, capacity=capacity)
        self.capacity = Unheeded(capacity)


class Unheeded(int):
    def __ge__(self, other: int) -> bool:
        return True


class Remembers(ToyCache):
    """Holds memory that the model reads before it was written."""

    def __init__(self, *, batch: int, capacity: int) -> None:
        super().__init__(batch=batch, capacity=capacity)
        self.memory = [{"deep": (torch.zeros(3),)}]


def commits(model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]) -> list[Tensor]:
    cache.commit([range(plan.rows) for plan in plans])
    return logits


def last_row_wrong(
    model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]
) -> list[Tensor]:
    """A guess at the model's last position gets other logits than the text."""
    for plan, rows in zip(plans, logits, strict=True):
        for index, position in enumerate(plan.positions[plan.anchor_row :]):
            rows[index] += float(position == 59 and len(plan.tree) > 0)
    return logits


def long_texts_wrong(
    model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]
) -> list[Tensor]:
    """Right, unless there is a prefix of 28 rows or more, which only whole texts reach."""
    return [
        rows.flip(-1) if plan.prefix >= 28 else rows
        for plan, rows in zip(plans, logits, strict=True)
    ]


def draws(model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]) -> list[Tensor]:
    torch.rand(1)
    return logits


def keeps_the_graph(
    model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]
) -> list[Tensor]:
    return [rows.requires_grad_() for rows in logits]


def crashes(model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]) -> list[Tensor]:
    if len(plans[0].tree):
        raise KeyError("lost")
    return logits


def wide_trees_wrong(
    model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]
) -> list[Tensor]:
    """Right for trees of up to 16 nodes, which most are."""
    return [torch.cat([rows[:17], rows[17:].flip(-1)]) for rows in logits]


def large_batches_wrong(
    model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]
) -> list[Tensor]:
    """Right for up to three sequences."""
    return [*logits[:3], *(rows.flip(-1) for rows in logits[3:])]


def late_pending_wrong(
    model: ToyAdapter, plans: Any, cache: ToyCache, logits: list[Tensor]
) -> list[Tensor]:
    """Right, unless several tokens and a tree come behind a prefix, beside another sequence."""
    return [
        rows.flip(-1)
        if plan.prefix and len(plan.pending) > 1 and len(plan.tree) and len(plans) > 1
        else rows
        for plan, rows in zip(plans, logits, strict=True)
    ]


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "no adapter": (lambda: "gpt2", "an adapter is a ModelAdapter|has the methods"),
    "few positions": (lambda: ToyAdapter(max_positions=40), "the suite needs 48 positions"),
    "eos outside": (lambda: ToyAdapter(eos=[11]), "eos_token_ids are in the vocabulary"),
    "no context": (lambda: ToyAdapter(context=1), "the logits depend on the first of six"),
    "anchor only": (
        lambda: Changed(lambda *step: [rows[:1] for rows in step[3]]),
        r"the logits are \[1 \+ T, V\]",
    ),
    "one sequence": (lambda: Changed(lambda *step: step[3][:1]), "one result per sequence"),
    "infinite": (lambda: Changed(lambda *step: [r / 0 for r in step[3]]), "logits are finite"),
    "commits": (lambda: Changed(commits), "a pass commits nothing"),
    "rows mixed up": (
        lambda: Changed(lambda *step: [rows.flip(0) for rows in step[3]]),
        "a row has the logits of its path alone",
    ),
    "chunks": (
        lambda: Changed(late_chunks_wrong),
        "a prompt in chunks is the prompt",
    ),
    "batches": (
        lambda: Changed(lambda *step: [rows + 0.01 * (len(step[3]) > 1) for rows in step[3]]),
        "a sequence of a batch has the logits that it has alone",
    ),
    "wrong kept": (
        lambda: WithCache(KeepsTheFirstSequences),
        "keep leaves the named sequences, in order",
    ),
    "random": (lambda: Changed(draws), "the global random generators are left alone"),
    "gradient": (lambda: Changed(keeps_the_graph), "the logits need no gradient"),
    "crash": (lambda: Changed(crashes), "a pass for which there is room runs; it raised KeyErr"),
    "wide": (lambda: Changed(wide_trees_wrong), "a row has the logits of its path alone"),
    "large batches": (
        lambda: Changed(large_batches_wrong),
        "a sequence of a batch has the logits that it has alone",
    ),
    "late pending": (
        lambda: Changed(late_pending_wrong),
        "a sequence of a batch has the logits that it has alone",
    ),
    "all kept": (lambda: WithCache(KeepsAll), "keep leaves the named sequences"),
    "no reset": (lambda: WithCache(NeverForgets), "reset forgets every row"),
    "short reset": (lambda: WithCache(LosesSequences), "reset brings all sequences back"),
    "no overflow": (lambda: WithCache(Endless), "rows for which there is no room are refused"),
    "reads memory": (
        lambda: Changed(reads_memory),
        "memory that holds no committed row is not read",
    ),
    "reads memory of batches": (
        lambda: Changed(reads_batches),
        "memory that holds no committed row is not read; .*all of it was 100",
    ),
    "leaks": (lambda: Changed(leaks), "a row does not move with a token that it must not see"),
    "blind": (BlindToItself, "a row moves with its own token"),
    "near horizon": (NearHorizon, "the suite needs a horizon of 24"),
    "over the horizon": (WithHorizon, "a text may cross its horizon"),
    "last position": (
        lambda: Changed(last_row_wrong, max_positions=60),
        "the last position is usable",
    ),
    "long texts": (lambda: Changed(long_texts_wrong), "every strategy gives the greedy text"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_adapter_is_caught_by_the_law_that_it_breaks(name: str) -> None:
    make, expected = BROKEN[name]
    adapter = make()
    if name.startswith("reads memory"):
        adapter.new_cache = lambda **sizes: Remembers(**sizes)
    with pytest.raises(AssertionError, match=f"^broken law: .*({expected})"):
        check_adapter(adapter)


def test_an_adapter_that_differs_from_its_model_is_caught() -> None:
    toy = ToyAdapter()
    with pytest.raises(AssertionError, match=r"a chain has the model's logits; off by .* with"):
        check_adapter(toy, reference=lambda tokens: toy.logits_after(tokens) + 0.01)


def test_memory_that_is_hidden_can_be_named() -> None:
    hidden = torch.zeros(3)
    adapter = Changed(lambda *step: [rows + 0 * hidden.sum() for rows in step[3]])
    check_adapter(adapter)  # it cannot be found from the cache
    with pytest.raises(AssertionError, match="memory that holds no committed row is not read"):
        check_adapter(adapter, storage=lambda _: [hidden])


class ByRow(StepPlan):
    """A plan whose positions are those of its rows in memory."""

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(range(self.prefix, self.prefix + self.rows))


def test_positions_by_row_are_caught() -> None:
    adapter: Any = build_adapter(tiny_model())
    forward = adapter.forward
    adapter.forward = lambda plans, cache: forward(
        [ByRow(plan.prefix, plan.pending, plan.tree) for plan in plans], cache
    )
    with pytest.raises(AssertionError, match="a row has the logits of its path alone"):
        check_adapter(adapter)


def test_a_mask_that_shows_too_much_is_caught() -> None:
    adapter: Any = build_adapter(tiny_model())
    lower = adapter.backend.lower

    def causal(masks: Any, **form: Any) -> Any:
        plans = [StepPlan(mask.prefix, (0,) * mask.rows) for mask in masks]
        return lower([plan.mask() for plan in plans], **form)

    adapter.backend.lower = causal
    with pytest.raises(AssertionError, match="a row has the logits of its path alone"):
        check_adapter(adapter)


def test_a_cache_that_keeps_other_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = HFCache.commit
    # Which finds it out before, when the adapter is built.
    monkeypatch.setattr("decodekit.adapters.hf.adapter.check_agreement", lambda *_: None)
    monkeypatch.setattr(
        HFCache, "commit", lambda cache, rows: commit(cache, [range(len(keep)) for keep in rows])
    )
    with pytest.raises(AssertionError, match="committed rows are those of their path"):
        check_adapter(build_adapter(tiny_model(), adapter="hf"))


def test_the_last_positions_are_compared_with_the_reference() -> None:
    """An adapter whose last positions are one is equal to itself there."""

    class Clamped(ToyAdapter):
        def logits_after(self, path: Sequence[int]) -> Tensor:
            return super().logits_after(path[:59])

    check_adapter(Clamped(max_positions=60))
    with pytest.raises(AssertionError, match="a chain has the model's logits"):
        check_adapter(Clamped(max_positions=60), reference=ToyAdapter().logits_after)
