"""When a text ends, and the one place where an accepted run is cut.

The rules are asked about each token in order, before the cache, the history, the stream or a
counter sees it. Most bugs of speculative decoders are a second place where this is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple, TypeAlias

from decodekit.engine.detokenizer import IncrementalText
from decodekit.errors import require_at_least
from decodekit.interfaces.events import FinishReason
from decodekit.interfaces.tree import ROOT

__all__ = ["Criterion", "Cut", "StopRules", "cut_run"]


Criterion: TypeAlias = "Callable[[Sequence[int]], bool]"
"""Says of the new tokens so far whether the text ends with the last of them. It is asked once
about each token, in order."""


class StopRules:
    """The rules of one request, and what it has produced.

    Where several rules fire at one token, the first of this order is the reason: an end-of-text
    token, a stop (string, tokens or criterion), ``max_new_tokens``, the model's last position.

    Args:
        max_new_tokens: Most tokens to produce, 0 or more.
        room: Tokens for which the model has positions; None for no limit.
        eos_token_ids: Any of these ends the text and is its last token.
        sequences: Runs of tokens, none empty, that end the text. They are its last tokens, and
            their text is not part of its text, unless ``include_stop``.
        criteria: Further rules.
        text: The text so far, with its stop strings; None if only tokens are wanted. It must be
            able to take back as many tokens as the longest of ``sequences`` has.
        include_stop: Whether the text of ``sequences`` stays.

    Raises:
        ConfigError: ``max_new_tokens`` is negative.
    """

    def __init__(
        self,
        *,
        max_new_tokens: int,
        room: int | None = None,
        eos_token_ids: Set[int] = frozenset(),
        sequences: Sequence[tuple[int, ...]] = (),
        criteria: Sequence[Criterion] = (),
        text: IncrementalText | None = None,
        include_stop: bool = False,
    ) -> None:
        require_at_least(max_new_tokens, 0, key="max_new_tokens")
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._eos = eos_token_ids
        self._sequences = sequences
        self._criteria = criteria
        self._text = text
        self._include_stop = include_stop
        fits = room is None or room >= max_new_tokens
        self._limit = max_new_tokens if room is None or fits else room
        self._limit_reason: FinishReason = "length" if fits else "capacity"
        if self._limit == 0:
            self.finish_reason = self._limit_reason

    @property
    def remaining(self) -> int:
        """Tokens that may still be produced."""
        return self._limit - len(self.tokens)

    def push(self, token: int) -> FinishReason | None:
        """Take in the next token; return the reason if the text ends with it."""
        self.tokens.append(token)
        last = token in self._eos or self.remaining == 0
        stop_tokens = self._stop_tokens()
        # Every criterion is asked about every token, since it may keep count.
        verdicts = [criterion(self.tokens) for criterion in self._criteria]
        stopped = stop_tokens > 0 or any(verdicts)
        if self._text is not None:
            stopped = self._push_text(token, stop_tokens, last=last or stopped) or stopped
        if token in self._eos:
            self.finish_reason = "eos"
        elif stopped:
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = self._limit_reason
        return self.finish_reason

    def _push_text(self, token: int, stop_tokens: int, *, last: bool) -> bool:
        """Add a token to the text; return whether a stop string ends it."""
        assert self._text is not None
        stopped = self._text.push(token)
        drops = not self._include_stop
        if drops and stop_tokens and token not in self._eos:
            self._text.drop(stop_tokens)
        if last:
            self._text.finish()
        else:
            self._text.hold(self._begun() if drops else 0)
        return stopped or self._text.stopped

    def _stop_tokens(self) -> int:
        """Return the length of the longest stop sequence that is complete now; 0 if none is."""
        ends = (len(run) for run in self._sequences if self._ends_with(run))
        return max(ends, default=0)

    def _begun(self) -> int:
        """Return how many of the last tokens may be the start of a stop sequence."""
        starts = (
            length
            for run in self._sequences
            for length in range(1, len(run))
            if self._ends_with(run[:length])
        )
        return max(starts, default=0)

    def _ends_with(self, run: tuple[int, ...]) -> bool:
        return tuple(self.tokens[-len(run) :]) == run


class Cut(NamedTuple):
    """What a text gets of an accepted run.

    Attributes:
        tokens: The tokens.
        last: The last of the nodes that carry them, ``ROOT`` if there is none.
        failure: Why the token after them could not be chosen or judged; None if it could.
    """

    tokens: tuple[int, ...]
    last: int
    failure: Exception | None


def cut_run(run: Iterable[tuple[int, int | None]], rules: StopRules) -> Cut:
    """Return an accepted run up to and including the token that ends the text, if one does.

    This is the only place where a run is shortened. What comes after the end is not asked for.
    Where something fails inside the run, a processor that leaves no token for example, the run ends
    before: the text has the tokens that it would have token by token.

    Args:
        run: The accepted tokens, each with its node or None; see ``Verifier.verify``.
        rules: Asked about each token.
    """
    tokens: list[int] = []
    last = ROOT
    try:
        for token, node in run:
            reason = rules.push(token)
            tokens.append(token)
            if node is not None:
                last = node
            if reason is not None:
                break
    except Exception as error:
        return Cut(tuple(tokens), last, error)
    return Cut(tuple(tokens), last, None)
