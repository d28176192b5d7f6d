"""What changes the logits before a token is chosen: penalties, bans and biases.

A processor is a callable with the signature of ``transformers``' ``LogitsProcessor``. Those here
keep nothing between two calls: a row of scores is changed by its own prefix alone, so a row after a
proposed node is changed as it would be if the node's path had been decoded token by token. They do
not write into what they are given, and they do not wait for the device.

A row whose every token is banned is all -inf; the sampler refuses it.

Shapes: B rows, L tokens of a prefix (the prompt's too), V vocabulary, K tokens or sequences. Token
ids from V on, which a tokenizer may have and the model cannot produce, are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from decodekit.engine.dry import DryPenalty
from decodekit.errors import ConfigError
from decodekit.interfaces.logits import LogitsProcessor

if TYPE_CHECKING:
    from decodekit.interfaces.sampling_params import SamplingParams

__all__ = [
    "BadWords",
    "LogitBias",
    "MinNewTokens",
    "NoRepeatNGram",
    "OccurrencePenalty",
    "RepetitionPenalty",
    "SuppressTokens",
    "name_of",
    "processors_of",
]

_NO_TOKEN = -1  # left of the first one of a bad word, and of a prefix


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Makes each token of the prefix less probable, once (Keskar et al., 2019, arXiv 1909.05858).

    Attributes:
        penalty: Divides the scores above 0 and multiplies the others; above 0, 1 changes nothing.
    """

    penalty: float

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        V = scores.shape[1]
        tokens = input_ids.clamp(max=V)
        changed = pad(scores, (0, 1))
        seen = changed.gather(1, tokens)  # [B, L]; a token seen twice gets the same value twice
        lowered = torch.where(seen < 0, seen * self.penalty, seen / self.penalty)
        return changed.scatter_(1, tokens, lowered)[:, :V]


@dataclass(frozen=True, slots=True, kw_only=True)
class OccurrencePenalty:
    """The presence and frequency penalties of the OpenAI API, on tokens after the prompt.

    Attributes:
        presence: Taken off the score of each token that has been generated.
        frequency: Taken off it once for every time that it has been.
        prompt_length: Tokens of a prefix that do not count.
    """

    presence: float
    frequency: float
    prompt_length: int

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        B, V = scores.shape
        tokens = input_ids[:, self.prompt_length :].clamp(max=V)
        counts = torch.zeros(B, V + 1, device=scores.device)
        counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))
        penalty = self.frequency * counts + self.presence * (counts > 0)
        return scores - penalty[:, :V].to(scores.dtype)


@dataclass(frozen=True, slots=True)
class NoRepeatNGram:
    """Bans what would complete an n-gram that the prefix has already, the prompt included.

    Attributes:
        size: Tokens of an n-gram, 1 or more; with 1 no token comes twice.
    """

    size: int

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        L = input_ids.shape[1]
        if self.size > L:
            return scores
        ngrams = input_ids.unfold(1, self.size, 1)  # [B, K, size], a view
        ending = input_ids[:, None, L - self.size + 1 :]  # [B, 1, size - 1]
        matches = (ngrams[:, :, :-1] == ending).all(dim=-1)
        return _ban_where(matches, ngrams[:, :, -1], scores)


class BadWords:
    """Bans the last token of each sequence wherever the prefix ends in all the others.

    Args:
        sequences: Token ids that must not come in a row; one on its own is always banned.

    Raises:
        ConfigError: A sequence is empty.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        if not all(sequences):
            raise ConfigError("a bad word has no tokens", key="sampling.bad_words")
        width = max(map(len, sequences), default=1)
        rows = [[_NO_TOKEN] * (width - len(sequence)) + [*sequence] for sequence in sequences]
        # [K, width], aligned at the last token.
        self._sequences = torch.tensor(rows, dtype=torch.int64).reshape(-1, width)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        sequences = self._sequences.to(scores.device, non_blocking=True)
        heads, lasts = sequences[:, :-1], sequences[:, -1]
        L, width = input_ids.shape[1], heads.shape[1]
        # The last tokens, [B, 1, width], also of a prefix that has not as many.
        ending = pad(input_ids, (width, 0), value=_NO_TOKEN)[:, None, L:]
        matches = ((heads == ending) | (heads == _NO_TOKEN)).all(dim=-1)  # [B, K]
        return _ban_where(matches, lasts.expand_as(matches), scores)


class LogitBias:
    """Adds a number to the score of each of some tokens.

    Args:
        biases: What is added, by token id; -inf bans a token.
    """

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens = torch.tensor([*biases], dtype=torch.int64)
        self._biases = torch.tensor([*biases.values()], dtype=torch.float64)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        known = self._tokens < scores.shape[1]
        tokens = self._tokens[known].to(scores.device, non_blocking=True)
        biases = self._biases[known].to(scores, non_blocking=True)
        return scores.index_add(1, tokens, biases.expand(len(scores), -1))


class SuppressTokens:
    """Bans some tokens everywhere.

    Args:
        ids: The tokens.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self._tokens = torch.tensor([*ids], dtype=torch.int64)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        known = self._tokens[self._tokens < scores.shape[1]]
        return scores.index_fill(1, known.to(scores.device, non_blocking=True), float("-inf"))


class MinNewTokens:
    """Bans the tokens that end a text until it is long enough.

    Args:
        count: Tokens that come before the first of ``end_ids``.
        prompt_length: Tokens of a prefix that do not count.
        end_ids: The tokens that end a text.
    """

    def __init__(self, count: int, *, prompt_length: int, end_ids: Iterable[int]) -> None:
        self._least = prompt_length + count
        self._ends = SuppressTokens(end_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        return self._ends(input_ids, scores) if input_ids.shape[1] < self._least else scores


def processors_of(
    params: SamplingParams,
    *,
    prompt_length: int,
    end_ids: Iterable[int],
    bad_words: Sequence[Sequence[int]] = (),
    banned_texts: Sequence[LogitsProcessor] = (),
    breakers: frozenset[int] = frozenset(),
    forced: Sequence[LogitsProcessor] = (),
) -> list[LogitsProcessor]:
    """Return the processors that ``params`` switches on, in the order in which they are applied.

    Args:
        params: The penalties, bans and biases.
        prompt_length: Tokens of the prompt.
        end_ids: The tokens that end a text.
        bad_words: Runs of token ids that must not come.
        banned_texts: What bans ``params.bad_words``.
        breakers: ``params.dry_sequence_breakers`` as tokens; see ``decoder.dry_breakers``.
        forced: What a model forces, which ``params.suppress_tokens`` may ban again.

    Raises:
        ConfigError: A bad word has no tokens.
    """
    chosen: list[LogitsProcessor] = []
    if params.logit_bias:
        chosen.append(LogitBias(params.logit_bias))
    if params.repetition_penalty != 1:
        chosen.append(RepetitionPenalty(params.repetition_penalty))
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if presence or frequency:
        chosen.append(
            OccurrencePenalty(presence=presence, frequency=frequency, prompt_length=prompt_length)
        )
    if params.dry_multiplier:
        chosen.append(
            DryPenalty(
                multiplier=params.dry_multiplier,
                base=params.dry_base,
                allowed_length=params.dry_allowed_length,
                breakers=breakers,
                last=params.dry_range,
            )
        )
    if params.no_repeat_ngram_size:
        chosen.append(NoRepeatNGram(params.no_repeat_ngram_size))
    if bad_words:
        chosen.append(BadWords(bad_words))
    chosen.extend(banned_texts)
    if params.min_new_tokens:
        chosen.append(
            MinNewTokens(params.min_new_tokens, prompt_length=prompt_length, end_ids=end_ids)
        )
    chosen.extend(forced)
    if params.suppress_tokens:
        chosen.append(SuppressTokens(params.suppress_tokens))
    return chosen


def _mark(tokens: Tensor, scores: Tensor) -> Tensor:
    """Return whether each token is among ``tokens`` [B, K] of its row, [B, V]."""
    B, V = scores.shape
    # The ids from V on share a last column, which is cut off.
    marks = torch.zeros(B, V + 1, dtype=torch.bool, device=scores.device)
    return marks.scatter_(1, tokens.clamp(max=V), True)[:, :V]


def _ban_where(banned: Tensor, tokens: Tensor, scores: Tensor) -> Tensor:
    """Return the scores with -inf for those of ``tokens`` [B, K] where ``banned`` [B, K]."""
    tokens = torch.where(banned, tokens, scores.shape[1])
    return scores.masked_fill(_mark(tokens, scores), float("-inf"))


def name_of(processor: Any) -> str:
    """Return the name that a caller knows a processor by."""
    owner = getattr(processor, "__self__", None) or getattr(processor, "func", None)
    if owner is not None:
        return name_of(owner)
    return str(getattr(processor, "__name__", type(processor).__name__))
