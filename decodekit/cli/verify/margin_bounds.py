"""Which tokens the filters may keep, and which they surely keep, if logits move a little.

For the filters whose border depends on all logits at once (typical, epsilon, eta, top-n-sigma,
"exclude top choices") there is no short formula for what it takes to change their mind. So the
question is asked the other way round: if no two logits move against each other by more than
``move``, which tokens *may* be kept, whatever happens, and which *surely* are? Each filter is
followed with bounds on the shares of what the filters before it may have left. The bounds are safe
and not always tight: a token that cannot be kept or dropped is never said to be.

Shapes: V vocabulary; here without the tokens that are banned, by logit, the best first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decodekit.engine.filters import excludes_top
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["kept_within"]

_ROUNDING = 1e-14
"""Masses below it may be nothing but the rounding of a sum of others."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What some filters leave.

    Attributes:
        surely: [V] bool, the tokens that they keep, whatever happens.
        maybe: [V] bool, those that they may keep; all of ``surely`` are among them.
    """

    surely: Tensor
    maybe: Tensor

    def among(self, surely: Tensor, maybe: Tensor) -> Kept:
        """Return what is left after a further filter."""
        return Kept(self.surely & surely, self.maybe & maybe)

    def or_best(self, scores: Tensor, before: Kept, move: float) -> Kept:
        """Return this and the best of what was left before, which a filter never drops."""
        maybe = torch.ones_like(before.maybe)
        if bool(before.surely.any()):
            maybe = scores >= scores[before.surely][0] - move
        surely = torch.zeros_like(maybe)
        first, *rest = torch.nonzero(before.maybe).flatten()[:2].tolist()
        surely[first] = not rest or bool(scores[first] - scores[rest[0]] >= move)
        return Kept(self.surely | (surely & before.surely), self.maybe | (maybe & before.maybe))


def kept_within(values: Tensor, params: SamplingParams, position: int, move: float) -> Kept:
    """Return which tokens the filters keep if no two logits move by more than ``move`` apart.

    Args:
        values: [V] in float64, finite, descending.
        params: The temperature, above 0, the filters and the seed.
        position: The absolute position of the token that is drawn.
        move: 0 or more.
    """
    every = torch.ones_like(values, dtype=torch.bool)
    kept = every_kept = Kept(every, every)
    if params.top_n_sigma > 0:
        spread = float(values.std(correction=0))
        below = values[0] - values
        kept = kept.among(
            below + move <= params.top_n_sigma * max(0.0, spread - move / 2),
            below - move <= params.top_n_sigma * (spread + move / 2),
        )
        kept = kept.or_best(values, every_kept, move)
    # From here on one unit is one of the exponent.
    scores, move = (values - values[0]) / params.temperature, move / params.temperature
    if 0 < params.top_k < len(scores):
        kept = kept.among(
            # A token is above its own lowered border.
            _above(scores, scores - move, kept.maybe) < params.top_k + (move > 0),
            _above(scores, scores + move, kept.surely) < params.top_k,
        )
    before = kept
    if params.top_p < 1:
        kept = kept.among(*_by_mass(scores, -scores, -scores, before, move, params.top_p))
    if params.min_p > 0:
        reach = -math.log(params.min_p)
        kept = kept.among(move - scores <= reach, -move - scores <= reach)
    if params.typical_p < 1:
        lowest, highest = _mean(scores, kept, move)
        near = (torch.maximum(scores - highest, lowest - scores) - move).clamp(min=0)
        far = torch.maximum(scores - lowest, highest - scores) + move
        kept = kept.among(*_by_mass(scores, near, far, kept, move, params.typical_p))
    for epsilon, by_entropy in ((params.epsilon_cutoff, False), (params.eta_cutoff, True)):
        if epsilon > 0:
            least, most = _borders(scores, kept, move, epsilon) if by_entropy else (epsilon,) * 2
            low, high = _shares(scores, kept, move)
            kept = kept.among(low >= most, high >= least).or_best(scores, kept, move)
    if excludes_top(params, position):
        kept = kept.among(*_without_top(scores, kept, move, params.xtc_threshold))
    return kept


def _above(scores: Tensor, borders: Tensor, some: Tensor) -> Tensor:
    """Return how many of some tokens lie above each of V borders."""
    return _before(some.long())[torch.searchsorted(-scores, -borders)]


def _before(values: Tensor) -> Tensor:
    """Return the sum of the values before each of V + 1 places."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _by_mass(
    scores: Tensor, near: Tensor, far: Tensor, kept: Kept, move: float, mass: float
) -> tuple[Tensor, Tensor]:
    """Return which tokens a filter surely and maybe keeps that keeps the nearest, up to a mass.

    A token is kept while those that are nearer hold less than ``mass``.

    Args:
        scores: [V], logits over the temperature.
        near: [V], how near a token may be; for top-p the nearest is the one with the best score.
        far: [V], how far it may be.
        kept: What the mass is shared among.
        move: As for ``kept_within``, over the temperature.
        mass: Below 1.
    """
    weights = scores.exp()
    surely, maybe = weights.where(kept.surely, 0.0), weights.where(kept.maybe, 0.0)
    exactly = bool((near == far).all())  # distances are scores, and move with them
    slack = move if exactly else 0.0
    odds = math.inf if mass >= 1 else mass / (1 - mass)
    # At least: those that are nearer in any case, against all that may be further.
    inside, _ = _split(far, near - slack, surely)
    _, outside = _split(far, near - slack, maybe)
    may = inside * math.exp(-move) < odds * outside
    # At most: those that may be nearer, itself left out, against those that are not in any case.
    inside, _ = _split(near, far + slack, maybe, equal=True)
    _, outside = _split(near, far + slack, surely, equal=True)
    inside, outside = (inside - maybe).clamp(min=0), outside + surely
    must = inside * math.exp(min(move, 700.0)) < odds * outside
    return must, may


def _split(
    distances: Tensor, borders: Tensor, weights: Tensor, *, equal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the weight of the tokens that are nearer than each of V borders, and of the rest.

    Args:
        distances: [V].
        borders: [V].
        weights: [V].
        equal: Whether a token at the border counts as nearer.
    """
    ranked, order = distances.sort()
    places = torch.searchsorted(ranked, borders.contiguous(), right=equal)
    ordered = weights[order]
    # The rest is added up itself: as a difference, a small one would be nothing but rounding.
    return _before(ordered)[places], _before(ordered.flip(0)).flip(0)[places]


def _shares(scores: Tensor, kept: Kept, move: float) -> tuple[Tensor, Tensor]:
    """Return the least and the largest share of each token among what is kept, [V] both."""
    weights = scores.exp()
    others = (weights.where(kept.maybe, 0.0).sum() - weights.where(kept.maybe, 0.0)).clamp(min=0)
    low = weights / (weights + others * math.exp(min(move, 700.0)))
    surely = weights.where(kept.surely, 0.0)
    high = weights / (weights + (surely.sum() - surely).clamp(min=0) * math.exp(-move))
    return low, high


def _mean(scores: Tensor, kept: Kept, move: float) -> tuple[float, float]:
    """Return bounds on the mean score of what is kept, by its shares, before scores move.

    The mean is largest if all above some score weigh as much as they can, and all below it as
    little, and smallest the other way round; so all such borders are tried.
    """
    weights = scores.exp()
    more, less = math.exp(min(move, 700.0) / 2), math.exp(-move / 2)
    low, high = weights.where(kept.surely, 0.0) * less, weights.where(kept.maybe, 0.0) * more

    def means(first: Tensor, rest: Tensor) -> Tensor:
        """Return the mean for each border: what is above it weighs ``first``."""
        mass, sums = (
            _before(above) + rest_of.sum() - _before(rest_of)
            for above, rest_of in ((first, rest), (first * scores, rest * scores))
        )
        real = mass > _ROUNDING
        return sums[real] / mass[real]

    return float(means(low, high).min()), float(means(high, low).max())


def _borders(scores: Tensor, kept: Kept, move: float, epsilon: float) -> tuple[float, float]:
    """Return bounds on the border of eta sampling, which the entropy of what is kept lowers."""
    low, high = _mean(scores, kept, move)
    weights = scores.exp()
    least = math.log(max(float(weights[kept.surely].sum()), 1e-300))
    most = math.log(float(weights[kept.maybe].sum()))
    # The entropy is the logarithm of the normaliser less the mean score.
    entropies = (most - low + move, least - high - move)
    first, second = (
        min(epsilon, math.sqrt(epsilon) * math.exp(min(-entropy, 0.0))) for entropy in entropies
    )
    return first, second


def _without_top(
    scores: Tensor, kept: Kept, move: float, threshold: float
) -> tuple[Tensor, Tensor]:
    """Return which tokens are surely and maybe left where the top choices are left out."""
    low, high = _shares(scores, kept, move)
    may_be_top, is_top = (high >= threshold) & kept.maybe, (low >= threshold) & kept.surely
    # A top choice goes where a lower one stays. All but the lowest have a lower one.
    may_go = may_be_top.clone()
    tops = torch.nonzero(may_be_top).flatten()[-2:].tolist()
    if tops:
        may_go[tops[-1]] = len(tops) > 1 and bool(scores[tops[0]] - scores[tops[1]] < move)
    lowest = float(scores[is_top].min()) if bool(is_top.any()) else math.inf
    must_go = (low >= threshold) & (scores > lowest + move)
    return ~may_go, ~must_go
