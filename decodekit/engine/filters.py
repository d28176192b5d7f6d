"""Which tokens a draw may give, and with which probabilities.

The filters come in the order of ``transformers``: temperature, top-k, top-p, min-p, typical,
epsilon and eta. Top-n-sigma comes before them all, since it looks at logits, which no temperature
changes for it, and "exclude top choices" after them, on what they leave. Tokens that are as good as
the last one kept are kept too, so that ties never depend on an order.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decodekit.engine.noise import CHOICE, uniform
from decodekit.errors import GenerationError
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["excludes_top", "require_finite", "warp"]


def warp(logits: Tensor, params: SamplingParams, positions: Sequence[int]) -> Tensor:
    """Return the probabilities that are drawn from, [R, V] in float32 or float64, not normalised.

    Args:
        logits: [R, V].
        params: The temperature, above 0, the filters and the seed.
        positions: The absolute position of the token to be drawn after each row, length R.

    Raises:
        GenerationError: A row holds NaN, +inf, or nothing but -inf.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    best = logits.amax(dim=-1, keepdim=True)
    require_finite(best)
    # The best token at 0: a small temperature then takes the others to -inf, and nothing to +inf.
    scores = (logits - best) / max(params.temperature, torch.finfo(torch.float32).tiny)
    if params.top_n_sigma > 0:
        far = best - logits > params.top_n_sigma * _deviation(logits)
        scores = scores.masked_fill(far, float("-inf"))
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    probs = scores.softmax(dim=-1)
    least = torch.zeros_like(probs[:, :1])
    if params.top_p < 1:
        least = _nucleus_floor(probs, params.top_p)
    if params.min_p > 0:
        least = torch.maximum(least, params.min_p * probs.amax(dim=-1, keepdim=True))
    probs = probs.masked_fill(probs < least, 0.0)
    if params.typical_p < 1:
        probs = _typical(_normal(probs), scores, params.typical_p)
    for epsilon, by_entropy in ((params.epsilon_cutoff, False), (params.eta_cutoff, True)):
        if epsilon > 0:
            probs = _cut_off(_normal(probs), epsilon, by_entropy=by_entropy)
    if params.xtc_probability > 0:
        rows = [row for row, place in enumerate(positions) if excludes_top(params, place)]
        if rows:
            probs[rows] = _without_top(_normal(probs[rows]), params.xtc_threshold)
    return probs


def excludes_top(params: SamplingParams, position: int) -> bool:
    """Return whether the top choices are left out of the draw at a position: one coin for each."""
    chance = params.xtc_probability
    return chance > 0 and uniform(params.seed, position, purpose=CHOICE) < chance


def require_finite(best: Tensor) -> None:
    """Raise if the largest logit of a row is NaN or infinite: the model's output is broken."""
    if not all(map(math.isfinite, best.flatten().tolist())):
        raise GenerationError("the model returned NaN or infinite logits")


def _normal(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def _deviation(logits: Tensor) -> Tensor:
    """Return the standard deviation of the logits of each row that are not banned, [R, 1]."""
    exact = logits.double()
    allowed = exact > float("-inf")
    count = allowed.sum(dim=-1, keepdim=True)
    mean = exact.where(allowed, 0.0).sum(dim=-1, keepdim=True) / count
    squares = (exact - mean).where(allowed, 0.0).square()
    return (squares.sum(dim=-1, keepdim=True) / count).sqrt()


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


def _typical(probs: Tensor, scores: Tensor, mass: float) -> Tensor:
    """Keep the tokens whose information is closest to the entropy, until they hold ``mass``.

    The information of a token less the entropy is the mean score less its score: the normaliser of
    the softmax is in both.

    Args:
        probs: [R, V], summing to 1.
        scores: [R, V], what they are the softmax of, where they are not 0.
        mass: Below 1.
    """
    possible = probs > 0
    scores = scores.where(possible, 0.0)
    mean = (probs * scores).sum(dim=-1, keepdim=True)
    distance = (mean - scores).abs().where(possible, float("inf"))
    ranked, order = distance.sort(dim=-1)
    held = probs.gather(-1, order).double()
    kept = (held.cumsum(dim=-1) - held < mass).sum(dim=-1, keepdim=True)
    limit = ranked.gather(-1, (kept - 1).clamp_(min=0))
    return probs.masked_fill(distance > limit, 0.0)


def _cut_off(probs: Tensor, epsilon: float, *, by_entropy: bool) -> Tensor:
    """Keep the tokens of a probability of ``epsilon`` or more, and the best.

    Args:
        probs: [R, V], summing to 1.
        epsilon: The border, where the entropy does not lower it.
        by_entropy: Whether the entropy may lower it: eta sampling.
    """
    border = torch.full_like(probs[:, :1], epsilon)
    if by_entropy:
        entropy = -torch.xlogy(probs, probs).sum(dim=-1, keepdim=True)
        border = torch.minimum(border, math.sqrt(epsilon) * (-entropy).exp())
    border = torch.minimum(border, probs.amax(dim=-1, keepdim=True))
    return probs.masked_fill(probs < border, 0.0)


def _without_top(probs: Tensor, threshold: float) -> Tensor:
    """Leave out the tokens of ``threshold`` or more, but for the least probable of them.

    Args:
        probs: [R, V], summing to 1.
        threshold: Above 0.
    """
    top = probs >= threshold
    last = probs.where(top, float("inf")).amin(dim=-1, keepdim=True)
    return probs.masked_fill(top & (probs > last), 0.0)
