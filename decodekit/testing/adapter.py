"""The laws of a model adapter and its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from decodekit.adapters.model_facts import is_transformers_model
from decodekit.adapters.plain_forward import plain_logits
from decodekit.interfaces.adapter import HasRepeat, KVCache, ModelAdapter
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.testing.adapter_text import check_texts
from decodekit.testing.adapter_unseen import check_memory, check_unseen_tokens
from decodekit.testing.laws import law, random_tokens, reordered
from decodekit.testing.subject import Subject

__all__ = ["check_adapter"]


def check_adapter(
    adapter: ModelAdapter,
    *,
    reference: Callable[[Sequence[int]], Tensor] | None = None,
    atol: float = 1e-4,
    storage: Callable[[KVCache], Iterable[Tensor]] | None = None,
    seed: int = 0,
) -> None:
    """Check an adapter: every row has exactly the logits of its path, whatever runs beside it.

    Use a small model with random weights that are large enough for its logits to depend on the
    whole prefix, in float32 or float64, with at least 48 positions.

    Args:
        adapter: What is checked.
        reference: The model without the adapter: the logits [V] after some tokens. None takes the
            forward pass of ``adapter.model`` over all of them, if that is a ``transformers`` model;
            else the adapter is only compared with itself, one sequence and one chain at a time.
        atol: Largest difference of two logits that should be equal.
        storage: The tensors in which a cache keeps rows, for the poison test; None looks for them
            in the cache's attributes.
        seed: Of the random prompts and trees.

    Raises:
        AssertionError: A law is broken; which, and on what input.
    """
    model = getattr(adapter, "model", None)
    if reference is None and is_transformers_model(model):
        reference = partial(_last_logits, model)
    subject = Subject(adapter, reference=reference, atol=atol, seed=seed)
    _check_facts(subject)
    for length in (1, 2, 9, 17, 40):
        tokens = subject.tokens(length)
        subject.check_reference(tokens, subject.alone(tokens))
    _check_trees(subject)
    _check_chunks(subject)
    _check_commits(subject)
    _check_scratch(subject)
    _check_batches(subject)
    _check_copies(subject)
    check_unseen_tokens(subject)
    check_memory(subject, storage)
    _check_edges(subject)
    _check_horizon(subject)
    check_texts(subject)


def _last_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits [V] after tokens, as the model itself computes them."""
    return plain_logits(model, tokens, range(len(tokens) - 1, len(tokens)))[0]


def _check_facts(subject: Subject) -> None:
    adapter = subject.adapter
    law(
        isinstance(adapter, ModelAdapter),
        "an adapter has the methods of ModelAdapter",
        f"{adapter}",
    )
    limit = adapter.max_positions
    law(limit is None or limit >= 48, "the suite needs 48 positions", f"max_positions is {limit}")
    near = subject.horizon(1)
    law(near is None or near >= 24, "the suite needs a horizon of 24", f"horizon(1) is {near}")
    law(
        all(0 <= token < adapter.vocab_size for token in adapter.eos_token_ids),
        "eos_token_ids are in the vocabulary",
        f"they are {sorted(adapter.eos_token_ids)} of {adapter.vocab_size}",
    )
    first, *rest = subject.tokens(6)
    other = (first + 1) % adapter.vocab_size
    gap = float((subject.alone([first, *rest]) - subject.alone([other, *rest])).abs().max())
    law(
        gap > 10 * subject.atol,
        "the logits depend on the first of six tokens, or nothing could be seen here",
        f"they differ by {gap:.3g}; take a model with larger random weights, or a smaller atol",
    )


def _check_trees(subject: Subject) -> None:
    choose = subject.choose
    for prefix, pending, sizes in (
        (0, 1, (1, 5, 12)),
        (0, 6, (1, 5, 12)),
        (5, 1, (1, 5, 12)),
        (9, 3, (1, 5, 40)),
    ):
        for nodes in sizes:
            text = subject.tokens(prefix + pending)
            tree = subject.tree(nodes, after=len(text), depth=20)
            cache = subject.prefilled(text[:prefix], capacity=prefix + pending + nodes)
            logits = subject.run(cache, [StepPlan(prefix, tuple(text[prefix:]), tree)])[0]
            for node in range(ROOT, len(tree)):
                path = [*text, *(() if node == ROOT else tree.path_tokens(node))]
                subject.close(
                    logits[node + 1],
                    subject.alone(path),
                    "a row has the logits of its path alone",
                    f"node {node} of {tree} after {text}, {prefix} of them in the cache",
                )
            other, place = reordered(choose, tree)
            cache = subject.prefilled(text[:prefix], capacity=prefix + pending + nodes)
            moved = subject.run(cache, [StepPlan(prefix, tuple(text[prefix:]), other)])[0]
            for node in range(len(tree)):
                subject.close(
                    moved[place[node] + 1],
                    logits[node + 1],
                    "the order of siblings does not matter",
                    f"node {node} of {tree} is node {place[node]} of {other}, after {text}",
                )


def _check_chunks(subject: Subject) -> None:
    text = subject.tokens(12)
    for sizes in ((1, 3, 8), (4, 4, 4), (11, 1), (1,) * 12):
        cache = subject.new_cache(capacity=12)
        done = 0
        for size in sizes:
            logits = subject.run(cache, [StepPlan(done, tuple(text[done : done + size]))])[0]
            cache.commit([range(size)])
            done += size
            subject.close(
                logits[0],
                subject.alone(text[:done]),
                "a prompt in chunks is the prompt",
                f"{text} in chunks of {sizes}, after {done}",
            )


def _check_commits(subject: Subject) -> None:
    choose, vocab_size = subject.choose, subject.adapter.vocab_size
    for _ in range(4):
        text = subject.tokens(4)
        cache = subject.prefilled(text[:3], capacity=40)
        for step in range(3):
            prefix = cache.lengths[0]
            tree = subject.tree(9, after=len(text), depth=6)
            deep = choose.choice([n for n in tree.leaves if n] or [0])  # not a leading run
            subject.run(cache, [StepPlan(prefix, tuple(text[prefix:]), tree)])
            path, lead = tree.path(deep), len(text) - prefix
            cache.commit([[*range(lead), *(lead + node for node in path)]])
            text += [tree.tokens[node] for node in path]
            where = f"step {step}, nodes {path} of {tree} were committed, the text is {text}"
            law(cache.lengths == (len(text),), "lengths count what was committed", where)
            text += random_tokens(choose, 1, vocab_size)
            # This pass is thrown away: the next one writes over its rows.
            after = subject.run(cache, [StepPlan(len(text) - 1, (text[-1],))])[0]
            subject.close(
                after[0], subject.alone(text), "committed rows are those of their path", where
            )


def _check_scratch(subject: Subject) -> None:
    text = subject.tokens(8)
    tree = subject.tree(10, after=8, depth=9)
    cache = subject.prefilled(text[:7], capacity=20)
    plan = StepPlan(7, (text[7],))
    subject.run(cache, [StepPlan(7, (text[0],), tree)])
    again = subject.run(cache, [plan])[0]
    subject.close(again[0], subject.alone(text), "a pass commits nothing", f"{tree}, then {plan}")
    subject.run(cache, [StepPlan(7, (text[0],), tree)])
    cache.commit([[]])
    law(cache.lengths == (7,), "committing nothing keeps nothing", f"lengths: {cache.lengths}")
    again = subject.run(cache, [plan])[0]
    subject.close(again[0], subject.alone(text), "lost rows do not matter", f"{tree}, then {plan}")
    cache.reset()
    law(cache.lengths == (0,), "reset forgets every row", f"lengths: {cache.lengths}")
    again = subject.run(cache, [StepPlan(0, tuple(text[:5]))])[0]
    subject.close(again[0], subject.alone(text[:5]), "a cache can be used again", text[:5])


def _check_batches(subject: Subject) -> None:
    choose = subject.choose
    for lengths in ((5, 5), (9, 1, 4), (1, 12, 2), (2, 6, 1, 3, 2)):
        texts = [subject.tokens(length) for length in lengths]
        cache = subject.new_cache(batch=len(texts), capacity=40)
        for round_ in range(2):
            for step in range(3):
                trees = [subject.tree(choose.randrange(7), after=len(text)) for text in texts]
                _batch_step(subject, cache, texts, trees, f"step {step} of {lengths}")
                kept = list(range(len(texts)))
                if step == 0 and len(texts) > 2:
                    del kept[1]
                elif step == 1:
                    del kept[:-1]
                expected = tuple(cache.lengths[sequence] for sequence in kept)
                if len(kept) < len(texts):
                    cache.keep(kept)
                texts = [texts[sequence] for sequence in kept]
                law(
                    cache.lengths == expected,
                    "keep leaves the named sequences, in order",
                    f"lengths {cache.lengths}, not {expected}, after keep({kept})",
                )
            cache.reset()
            law(
                cache.lengths == (0,) * len(lengths),
                "reset brings all sequences back",
                f"lengths {cache.lengths} after round {round_}",
            )
            texts = [subject.tokens(length) for length in reversed(lengths)]


def _check_copies(subject: Subject) -> None:
    """Run what sequences begin with once, copy its rows, and let each go its own way."""
    choose = subject.choose
    for sources in ((0, 0, 0), (0, 1, 0, 1, 2)):
        begun = [subject.tokens(length) for length in (7, 1, 4)[: max(sources) + 1]]
        cache = subject.new_cache(batch=len(sources), capacity=40)
        if not isinstance(cache, HasRepeat):
            return
        cache.keep(range(len(begun)))
        trees = [TokenTree() for _ in begun]
        _batch_step(subject, cache, begun, trees, f"before repeat{sources}")
        lengths = cache.lengths
        cache.repeat(sources)
        expected = tuple(lengths[source] for source in sources)
        law(
            cache.lengths == expected,
            "repeat copies the named sequences",
            f"lengths {cache.lengths}, not {expected}, after repeat({sources})",
        )
        texts = [[*begun[source][: lengths[source]], *subject.tokens(2)] for source in sources]
        for step in range(2):
            trees = [subject.tree(choose.randrange(5), after=len(text)) for text in texts]
            _batch_step(subject, cache, texts, trees, f"step {step} after repeat{sources}")


def _batch_step(
    subject: Subject, cache: KVCache, texts: list[list[int]], trees: list[TokenTree], where: str
) -> None:
    """Run a step of a batch, compare every row, and commit a path of each tree."""
    plans = [
        StepPlan(length, tuple(text[length:]), tree)
        for text, length, tree in zip(texts, cache.lengths, trees, strict=True)
    ]
    logits = subject.run(cache, plans)
    keep: list[list[int]] = []
    for index, (text, plan) in enumerate(zip(texts, plans, strict=True)):
        for node in range(ROOT, len(plan.tree)):
            path = [*text, *(() if node == ROOT else plan.tree.path_tokens(node))]
            subject.close(
                logits[index][node + 1],
                subject.alone(path),
                "a sequence of a batch has the logits that it has alone",
                f"{where}, sequence {index}, node {node} of {plan}",
            )
        path_nodes = plan.tree.path(len(plan.tree) - 1) if len(plan.tree) else ()
        lead = len(plan.pending)
        keep.append([*range(lead), *(lead + node for node in path_nodes)])
        text += [plan.tree.tokens[node] for node in path_nodes]
        text += subject.tokens(subject.choose.choice((1, 1, 3)))
    cache.commit(keep)


def _check_edges(subject: Subject) -> None:
    """Run up to the last row of the cache, and the last position of the model."""
    text = subject.tokens(9)
    cache = subject.new_cache(capacity=9)
    law(cache.capacity >= 9, "a cache has the capacity asked for", f"9, not {cache.capacity}")
    logits = subject.run(cache, [StepPlan(0, tuple(text[:5]), TokenTree.chain(text[5:]))])[0]
    subject.close(logits[4], subject.alone(text), "every row of the capacity can be used", text)
    cache.commit([range(9)])
    over = tuple(subject.tokens(cache.capacity - 9 + 1))
    try:
        subject.adapter.forward([StepPlan(9, over)], cache)
    except Exception:  # any refusal will do
        pass
    else:
        law(
            False,
            "rows for which there is no room are refused",
            f"{len(over)} rows behind 9 of {cache.capacity}",
        )
    limit = subject.adapter.max_positions
    if limit is not None and limit <= 1024:
        text = subject.tokens(limit)
        cache = subject.prefilled(text[:-4], capacity=limit)
        for plan in (
            StepPlan(limit - 4, tuple(text[-4:-1]), TokenTree.chain(text[-1:])),
            StepPlan(limit - 4, tuple(text[-4:])),
            StepPlan(limit - 4, (text[-4],), TokenTree.chain(text[-3:])),
        ):
            logits = subject.run(cache, [plan])[0]
            subject.close(
                logits[-1],
                subject.alone(text),
                "the last position is usable",
                f"position {limit - 1}",
            )
        subject.check_reference(text, logits[-1])


def _check_horizon(subject: Subject) -> None:
    """Take a text over the horizon of a short one, a token at a time and thrown away at first."""
    border = subject.horizon(1)
    limit = subject.adapter.max_positions
    if border is None or border > 1024 or (limit is not None and border + 4 > limit):
        return
    text = subject.tokens(border + 4)
    cache = subject.prefilled(text[: border - 2], capacity=len(text))
    ends = (border, border + 1, border - 1)  # of passes of which nothing is kept
    for keep, end in [*((False, end) for end in ends), *((True, border + 2 * i) for i in range(3))]:
        start = cache.lengths[0]
        logits = subject.run(cache, [StepPlan(start, tuple(text[start:end]))])[0]
        where = f"{end} tokens, {start} of them in the cache, the horizon is {border}"
        subject.close(logits[0], subject.alone(text[:end]), "a text may cross its horizon", where)
        if keep:
            cache.commit([range(end - start)])
