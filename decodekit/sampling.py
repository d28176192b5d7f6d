"""How the target model chooses a token after a row: argmax, or a draw keyed by the position.

Under sampling each absolute position has one uniform number, made from (seed, position) by a
counter-based generator, and the token is read off the inverse of the cumulative distribution. So
the text is a function of the model, the prompt and the seed alone: every strategy, window and
backend gives the *same tokens*, and a window of Jacobi iterations converges under sampling just as
it does under argmax. The global generators of torch, numpy and random are not touched.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decodekit.errors import ConfigError, GenerationError

__all__ = [
    "GreedySampler",
    "PositionSampler",
    "Sampler",
    "SamplingParams",
    "make_sampler",
    "uniform",
    "warp",
]


@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy decoding.

    Attributes:
        temperature: Divides the logits; 0 is greedy decoding, whatever the other fields say.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the fewest most probable tokens whose probability sums to ``top_p`` or more.
        min_p: Keep the tokens that have ``min_p`` times the probability of the best or more.
        seed: Keys the draws; the same seed gives the same tokens.

    Raises:
        ConfigError: A value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kinds in (
            ("temperature", (int, float)),
            ("top_k", int),
            ("top_p", (int, float)),
            ("min_p", (int, float)),
            ("seed", int),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                kind = "a whole number" if kinds is int else "a number"
                raise ConfigError(f"{name} must be {kind}, not {value!r}", key=name, value=value)
        for name, ok, rule in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", 0 <= self.seed < 2**64, "in [0, 2**64)"),
        ):
            if not ok:
                value = getattr(self, name)
                raise ConfigError(f"{name} must be {rule}, not {value}", key=name, value=value)


class Sampler(Protocol):
    """Chooses the target model's token after rows of logits."""

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return the token after each of R rows.

        Args:
            logits: [R, V].
            positions: The absolute position of the token to be chosen for each row, length R.

        Raises:
            GenerationError: A row holds NaN, +inf, or nothing but -inf.
        """
        ...


class GreedySampler:
    """The most probable token; of equals, the one with the lowest id."""

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return the argmax of each row; see ``Sampler.choose``."""
        best, tokens = logits.max(dim=-1)
        _check_finite(best)
        return tokens.tolist()


class PositionSampler:
    """Draws from the warped distribution with one uniform number per absolute position.

    Args:
        params: The temperature, above 0, the filters and the seed.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return one draw per row; see ``Sampler.choose``."""
        probs = warp(logits, self.params)
        # Float64 sums in order of the token ids: tiny differences between two runs of a model move
        # the borders by as little, and never swap two tokens of nearly the same probability.
        cdf = probs.double().cumsum(dim=-1)
        draws = [uniform(self.params.seed, position) for position in positions]
        wanted = torch.tensor(draws, dtype=torch.float64, device=cdf.device) * cdf[:, -1]
        # The first token whose cumulative sum is above the draw has probability above 0.
        tokens = torch.searchsorted(cdf, wanted[:, None], right=True).squeeze(-1)
        return tokens.tolist()


def make_sampler(params: SamplingParams) -> Sampler:
    """Return the sampler that ``params`` describes."""
    return PositionSampler(params) if params.temperature > 0 else GreedySampler()


def uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) of a position: Philox with key ``seed``, 53 bits."""
    bits = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities that are drawn from, [R, V] in float32.

    In this order: temperature, top-k, softmax, top-p, min-p; the result is not normalised again.
    Tokens as probable as the last one kept are kept too, so that ties never depend on an order.

    Args:
        logits: [R, V].
        params: The temperature, above 0, and the filters.
    """
    best = logits.amax(dim=-1, keepdim=True).float()
    _check_finite(best)
    # The best token at 0: a small temperature then takes the others to -inf, and nothing to +inf.
    scores = (logits.float() - best) / max(params.temperature, torch.finfo(torch.float32).tiny)
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    probs = scores.softmax(dim=-1)
    least = torch.zeros_like(probs[:, :1])
    if params.top_p < 1:
        least = _nucleus_floor(probs, params.top_p)
    if params.min_p > 0:
        least = torch.maximum(least, params.min_p * probs.amax(dim=-1, keepdim=True))
    return probs.masked_fill(probs < least, 0.0)


def _nucleus_floor(probs: Tensor, top_p: float) -> Tensor:
    """Return the probability of the last token that top-p keeps in each row, [R, 1].

    A full sort of a large vocabulary costs milliseconds a row; nearly always the most probable
    few hundred tokens are enough, and where they are not, more are looked at.
    """
    vocabulary = probs.shape[-1]
    width = min(256, vocabulary)
    while True:
        ranked = probs.topk(width, dim=-1).values
        mass = ranked.double().cumsum(dim=-1)
        # A token is kept while the mass before it is below top_p.
        kept = (mass - ranked < top_p).sum(dim=-1, keepdim=True)
        if width == vocabulary or bool((kept < width).all()):
            return ranked.gather(-1, (kept - 1).clamp_(min=0))
        width = min(width * 16, vocabulary)


def _check_finite(best: Tensor) -> None:
    """Raise if the largest logit of a row is NaN or infinite: the model's output is broken."""
    if not all(map(math.isfinite, best.flatten().tolist())):
        raise GenerationError("the model returned NaN or infinite logits")
