"""DRY, "don't repeat yourself": a penalty on tokens that would go on with a repetition.

After p-e-w, text-generation-webui pull request 5677 (2024): where the last n tokens of the prefix
came before, the token that came after them costs ``multiplier * base ** (n - allowed_length)``, for
the longest such n of each token, if n is ``allowed_length`` or more. So a short repetition, such as
a name, is free, and a long one soon costs more than any logit is worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["DryPenalty"]

_MANY = 32
"""Repetitions are followed token by token up to this length, and then all in one go."""

_LARGEST = 1e37
"""No penalty is larger: it has to be a float32 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryPenalty:
    """Makes the tokens that would go on with a repetition less probable.

    As the processors of ``decodekit.engine.processors``, but that the tokens of the prefix are
    compared on the CPU.

    Attributes:
        multiplier: The penalty for a repetition of ``allowed_length`` tokens.
        base: The factor for each further token, 1 or more.
        allowed_length: The shortest repetition that costs something, 1 or more.
        breakers: Tokens that no repetition reaches over, and that are not penalised.
        last: Only so many tokens at the end of the prefix are looked at; 0 looks at all.
    """

    multiplier: float
    base: float
    allowed_length: int
    breakers: frozenset[int]
    last: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        changed = scores.clone()
        for row, prefix in enumerate(input_ids.cpu().numpy()):
            found = self._repetitions(prefix[-self.last :])
            tokens = [token for token in found if token < scores.shape[1]]
            if tokens:
                penalties = [self._penalty(found[token]) for token in tokens]
                changed[row, tokens] -= torch.tensor(penalties).to(changed)
        return changed

    def _penalty(self, length: int) -> float:
        grown = (length - self.allowed_length) * math.log(self.base)
        if math.log(self.multiplier) + grown >= math.log(_LARGEST):
            return _LARGEST
        return self.multiplier * self.base ** (length - self.allowed_length)

    def _longest(self) -> int:
        """Return the length of a repetition from which on the penalty does not grow."""
        if self.base == 1:
            return self.allowed_length
        grown = max(0.0, math.log(_LARGEST / self.multiplier) / math.log(self.base))
        return self.allowed_length + math.ceil(min(grown, 1e9))

    def _repetitions(self, prefix: np.ndarray) -> dict[int, int]:
        """Return, by the token that would go on with it, how long the longest repetition is."""
        if len(prefix) < 2:
            return {}
        ending = prefix[::-1]
        # The tokens before the first breaker, seen from the end, are all that can match.
        reach = 0
        for token in ending[: self._longest()].tolist():
            if token in self.breakers:
                break
            reach += 1
        places = np.arange(len(prefix) - 1)  # where an earlier occurrence ends
        found: dict[int, int] = {}
        for length in range(min(reach, _MANY)):
            longer = (places >= length) & (prefix[places - length] == ending[length])
            if length >= self.allowed_length:
                found.update(dict.fromkeys(prefix[places[~longer] + 1].tolist(), length))
            places = places[longer]
        if reach <= _MANY:
            lengths = np.full(len(places), reach)
        elif len(places):  # many in a text that repeats itself, so not token by token
            lengths = _common_starts(ending, reach)[len(prefix) - 1 - places]
        if len(places):
            order = np.argsort(lengths, kind="stable")  # of each token the longest comes last
            order = order[lengths[order] >= self.allowed_length]
            found.update(
                zip(prefix[places[order] + 1].tolist(), lengths[order].tolist(), strict=True)
            )
        return {token: length for token, length in found.items() if token not in self.breakers}


def _common_starts(text: np.ndarray, most: int) -> np.ndarray:
    """Return how many tokens from each place on are those at the start, ``most`` at most.

    The Z-algorithm (Gusfield, 1997): each token is compared once.
    """
    tokens = text.tolist()
    found = [0] * len(tokens)
    start = end = 0  # of the stretch that reaches furthest and equals the start
    for place in range(1, len(tokens)):
        length = min(found[place - start], end - place) if place < end else 0
        while place + length < len(tokens) and tokens[length] == tokens[place + length]:
            length += 1
        if place + length > end:
            start, end = place, place + length
        found[place] = length
    return np.minimum(found, most)
