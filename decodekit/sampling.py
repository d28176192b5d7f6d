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
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decodekit.errors import GenerationError
from decodekit.params import SamplingParams

__all__ = [
    "DRAFT",
    "TARGET",
    "TEST",
    "GreedySampler",
    "PositionSampler",
    "Sampler",
    "draw",
    "make_sampler",
    "require_finite",
    "uniform",
    "warp",
]


TARGET, DRAFT, TEST = range(3)
"""Who draws, see ``uniform``: the target its own choice, a draft model, the test of a draft."""


class Sampler(Protocol):
    """Chooses the target model's token after rows of logits."""

    @property
    def seed(self) -> int:
        """The key of the draws."""
        ...

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return the token after each of R rows.

        Args:
            logits: [R, V].
            positions: The absolute position of the token to be chosen for each row, length R.

        Raises:
            GenerationError: A row holds NaN, +inf, or nothing but -inf.
        """
        ...

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution that is drawn from after each row, [R, V] in float32.

        Rows sum to about 1. The arguments and errors are those of ``choose``.
        """
        ...


class GreedySampler:
    """The most probable token; of equals, the one with the lowest id."""

    seed = 0

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return the argmax of each row; see ``Sampler.choose``."""
        best, tokens = logits.max(dim=-1)
        require_finite(best)
        return tokens.tolist()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return 1 for the argmax and 0 for all else; see ``Sampler.probabilities``."""
        best, tokens = logits.max(dim=-1)
        require_finite(best)
        return torch.zeros(logits.shape, device=logits.device).scatter_(-1, tokens[:, None], 1.0)


class PositionSampler:
    """Draws from the warped distribution with one uniform number per absolute position.

    Args:
        params: The temperature, above 0, the filters and the seed.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = params.seed

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return one draw per row; see ``Sampler.choose``."""
        draws = [uniform(self.seed, position) for position in positions]
        return draw(warp(logits, self.params), draws)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the warped distribution; see ``Sampler.probabilities``."""
        probs = warp(logits, self.params)
        return probs / probs.sum(dim=-1, keepdim=True)


def make_sampler(params: SamplingParams) -> Sampler:
    """Return the sampler that ``params`` describes."""
    return PositionSampler(params) if params.temperature > 0 else GreedySampler()


def uniform(seed: int, position: int, *, stream: int = TARGET, draw: int = 0) -> float:
    """Return a uniform number in [0, 1) of a position: Philox with key ``seed``, 53 bits.

    Args:
        seed: The key, in [0, 2**64).
        position: The absolute position that it is for.
        stream: Who draws: ``TARGET``, ``DRAFT`` or ``TEST``. The numbers of two streams are
            independent.
        draw: Which number of that position and stream.
    """
    counter = position + (draw << 64) + (stream << 128)
    bits = int(np.random.Philox(key=seed, counter=counter).random_raw())
    return (bits >> 11) * 2.0**-53


def draw(probs: Tensor, numbers: Sequence[float]) -> list[int]:
    """Return the token at a number of each row's cumulative distribution, length R.

    Args:
        probs: [R, V]; rows need not sum to 1. A token of probability 0 is never returned.
        numbers: One in [0, 1) for each row, length R.
    """
    # Float64 sums in order of the token ids: tiny differences between two runs of a model move
    # the borders by as little, and never swap two tokens of nearly the same probability.
    cdf = probs.double().cumsum(dim=-1)
    wanted = torch.tensor(numbers, dtype=torch.float64, device=cdf.device) * cdf[:, -1]
    # The first token whose cumulative sum is above the number has probability above 0.
    tokens = torch.searchsorted(cdf, wanted[:, None], right=True).squeeze(-1)
    return tokens.tolist()


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities that are drawn from, [R, V] in float32.

    In this order: temperature, top-k, softmax, top-p, min-p; the result is not normalised again.
    Tokens as probable as the last one kept are kept too, so that ties never depend on an order.

    Args:
        logits: [R, V].
        params: The temperature, above 0, and the filters.
    """
    best = logits.amax(dim=-1, keepdim=True).float()
    require_finite(best)
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


def require_finite(best: Tensor) -> None:
    """Raise if the largest logit of a row is NaN or infinite: the model's output is broken."""
    if not all(map(math.isfinite, best.flatten().tolist())):
        raise GenerationError("the model returned NaN or infinite logits")
