"""What a request returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from decodekit.engine.logprobs import TokenLogprob
from decodekit.interfaces.events import FinishReason

__all__ = ["GenerationResult", "GenerationStats", "TextChunk", "TextScore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """How a request went.

    Attributes:
        steps: Decoding steps; each is one forward pass, after a prompt longer than
            ``prefill_chunk`` has been run in passes of its own.
        tokens: New tokens.
        nodes: Guessed tokens that were run, in all steps.
        seconds: Wall time, from the call to the last token.
        forward_seconds: Wall time in the model's forward passes; the rest is host work. On a GPU,
            the time until the calls returned. In a batch, of the passes that it took part in.
        time_to_first_token: Wall time in seconds, from the call to the first token; 0 if there is
            none.
    """

    steps: int
    tokens: int
    nodes: int
    seconds: float
    forward_seconds: float
    time_to_first_token: float

    @property
    def tokens_per_step(self) -> float:
        """New tokens per step: the step compression ratio S of Fu et al. (2024)."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def rows_per_step(self) -> float:
        """Mean rows of a step: the anchor and the guessed nodes, without the prompt."""
        return 1 + self.nodes / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """One accepted run of a stream.

    Attributes:
        text: The text that became certain with this run; may be empty while a character is
            incomplete or a stop string may be under way. All texts joined are the result's text.
        tokens: The run's token ids.
        finish_reason: Why the text ends with this run; None if it goes on.
        logprobs: One entry per token, if they were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A request, finished or as far as it has come.

    Attributes:
        text: The new text, without special tokens and cut before a stop string.
        tokens: The new token ids, up to and including the one that ended the text.
        finish_reason: Why the text ended; None while the request is under way.
        stats: How it went.
        prompt_tokens: The token ids that were continued.
        logprobs: One entry per new token, if they were asked for.
        prompt_logprobs: One entry per token of the prompt, if they were asked for; None for the
            first, which nothing comes before.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None
    stats: GenerationStats
    prompt_tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """How probable the model holds a text.

    Attributes:
        tokens: Its token ids.
        logprobs: One entry per token; None for the first, which nothing comes before.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob | None]

    @property
    def total(self) -> float:
        """The natural logarithm of the probability of all tokens after the first."""
        return math.fsum(one.logprob for one in self.logprobs if one is not None)

    @property
    def perplexity(self) -> float:
        """The perplexity of all tokens after the first; NaN where there is none."""
        count = len(self.tokens) - 1
        return math.exp(-self.total / count) if count else math.nan
