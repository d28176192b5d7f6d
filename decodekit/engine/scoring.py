"""Log-probabilities of the tokens of a given text, piece by piece and without decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decodekit.engine.logprobs import TokenLogprob, token_logprobs
from decodekit.engine.runner import Cancelled, LocalRunner
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree

__all__ = ["score_texts"]

_LOGITS = 2**24
"""So many logits of a pass are wanted at once at most: 64 MiB in float32."""


def score_texts(
    runner: LocalRunner,
    texts: Sequence[Sequence[int]],
    tops: Sequence[int | None],
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[list[TokenLogprob | None]]:
    """Run B texts but for their last tokens, and return the log-probabilities of their tokens.

    A pass of the model gives logits after an anchor and the nodes below it. So a piece of a text is
    run as a chain of guesses, all of which are then committed. Afterwards the last token of each
    text is pending.

    Args:
        runner: Has been started with B sequences; its cache is empty.
        texts: Token ids, at least one each.
        tops: How many of the most probable tokens are reported with each one. A text with None is
            not run and has an empty list.
        cancelled: Asked between passes whether to give up.

    Returns:
        An entry for each token; None for the first of a text, which nothing comes before.

    Raises:
        Cancelled: The request was cancelled meanwhile.
    """
    found: list[list[TokenLogprob | None]] = [[] if top is None else [None] for top in tops]
    vocabulary = runner.adapter.vocab_size
    longest = max(1, min(runner.prefill_chunk, _LOGITS // (vocabulary * len(texts))))
    while True:
        sizes = [
            0 if top is None else _piece(runner, done, len(text) - 1 - done, longest)
            for text, top, done in zip(texts, tops, runner.cache.lengths, strict=True)
        ]
        if not any(sizes):
            return found
        logits = runner.run(
            [
                # A text that is done takes part with one row that is not kept.
                StepPlan(done, (text[done],), TokenTree.chain(text[done + 1 : done + size]))
                for text, done, size in zip(texts, runner.cache.lengths, sizes, strict=True)
            ]
        )
        for text, top, done, size, rows, entries in zip(
            texts, tops, runner.cache.lengths, sizes, logits, found, strict=True
        ):
            if size and top is not None:
                tokens = text[done + 1 : done + 1 + size]
                entries += token_logprobs(rows[:size], tokens, top=top)
        runner.cache.commit([range(size) for size in sizes])
        if cancelled():
            raise Cancelled


def _piece(runner: LocalRunner, done: int, left: int, longest: int) -> int:
    """Return how many tokens of a text the next pass runs.

    Args:
        runner: Knows how far guesses may reach.
        done: Tokens in the cache.
        left: Tokens that are to be run.
        longest: Most tokens of a pass.
    """
    limit = runner.horizon(done + 1)
    room = longest if limit is None else min(longest, limit - done)
    return max(0, min(left, max(room, 1)))
