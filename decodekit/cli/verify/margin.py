"""By how much two logits would have to draw closer for another token to come out.

V is the size of the vocabulary. All costs are differences of two logits, so that one tolerance fits
argmax, draws and filters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decodekit.cli.verify.margin_bounds import kept_within
from decodekit.engine.noise import exponentials
from decodekit.engine.sampling import Sampler
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = ["margin"]

_NEAREST = 1e-7
"""A change of the logits that may always happen."""

_FARTHEST = 1e6
"""A change of the logits that is no rounding."""


def margin(row: Tensor, sampler: Sampler, position: int, other: int) -> float:
    """Return a bound on what it takes for ``other`` to be chosen; 0 if it is, or infinity.

    No smaller change of the logits does it, of any two of them against each other. Under greedy
    decoding it is the distance of its logit to the best one. Under sampling ``other`` has to be
    kept by the filters, and every token that does better in the draw has to fall behind it, or all
    that do not have to be dropped by a filter together.

    Args:
        row: [V], the logits that the token was chosen from, processors and constraint applied.
        sampler: What chose it.
        position: Its absolute position.
        other: The token to be chosen instead.
    """
    if not 0 <= other < len(row) or not row[other] > -math.inf:
        return math.inf
    params = getattr(sampler, "params", None)
    if not isinstance(params, SamplingParams):
        return float(row.max() - row[other])
    row = row.double()
    noise = exponentials(params.seed, position, len(row)).to(row.device)
    race = row - params.temperature * noise.log()  # where the largest wins, in units of logits
    if _has_loose_borders(params):
        return _least_move(row, race - race[other], params, position, other)
    filters = _Filters(row, params)
    leads, order = (race - race[other]).sort(descending=True)
    kept = filters.cost_to_keep(other)
    best = max(kept, float(leads[0]))  # all that are ahead fall behind
    # Or the first few are dropped, and the rest fall behind. Dropping more costs more.
    for count in range(1, int((leads > 0).sum()) + 1):
        dropped = filters.cost_to_drop(order[:count])
        if max(dropped, kept) >= best:
            break
        best = min(best, max(dropped, kept, float(leads[count])))
    return best


def _has_loose_borders(params: SamplingParams) -> bool:
    """Return whether a filter is on whose border depends on all logits at once."""
    return (
        params.typical_p < 1
        or max(
            params.epsilon_cutoff,
            params.eta_cutoff,
            params.top_n_sigma,
            params.xtc_probability,
        )
        > 0
    )


def _least_move(
    row: Tensor, leads: Tensor, params: SamplingParams, position: int, other: int
) -> float:
    """Return the least move of logits with which ``other`` may come out, by bisection.

    It has to be a token that the filters may keep, and none that they surely keep may be ahead of
    it by more.

    Args:
        row: [V] in float64.
        leads: [V], by how much each token is ahead in the race.
        params: As for ``kept_within``.
        position: Likewise.
        other: The token.
    """
    order = row.argsort(descending=True, stable=True)
    order = order[row[order] > -math.inf]
    values, leads, place = row[order], leads[order], int((order == other).nonzero())

    def possible(move: float) -> bool:
        kept = kept_within(values, params, position, move)
        return bool(kept.maybe[place]) and not bool((kept.surely & (leads > move)).any())

    if possible(_NEAREST):
        return 0.0
    low, high = _NEAREST, 8 * _NEAREST
    while not possible(high):
        low, high = high, high * 8
        if high > _FARTHEST:
            return math.inf
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low


class _Filters:
    """How far tokens are from being kept or dropped by top-k, top-p and min-p.

    Args:
        row: [V] in float64.
        params: The temperature and the filters.
    """

    def __init__(self, row: Tensor, params: SamplingParams) -> None:
        self._row = row
        self._params = params
        self._reach = params.temperature * math.log(params.min_p) if params.min_p else -math.inf
        ranked = row[row > -math.inf].sort(descending=True).values
        self._last = -math.inf  # the last that top-k keeps
        if 0 < params.top_k < len(ranked):
            self._last = float(ranked[params.top_k - 1])
        self._best = float(ranked[0])
        total = self._weights(row[row >= self._last]).sum()
        self._shares = torch.where(row >= self._last, self._weights(row) / total, 0.0)

    def cost_to_keep(self, token: int) -> float:
        """Return what it takes for every filter to keep ``token``; 0 if they do."""
        value = float(self._row[token])
        costs = [self._last - value, self._best + self._reach - value]
        if self._params.top_p < 1:
            # It may also gain ranks: each rank has the mass of those before it.
            values, shares = self._ranked(torch.ones_like(self._row, dtype=torch.bool))
            before = shares.cumsum(dim=-1) - shares
            costs.append(_least((values - value).clamp(min=0), self._excess(before)))
        return max(0.0, *costs)

    def cost_to_drop(self, tokens: Tensor) -> float:
        """Return what it takes for a filter to drop all of ``tokens``; 0 if they are dropped.

        Every filter drops what is below a border. So the highest of them is what counts, and only
        the tokens that stay can push it out.
        """
        stays = torch.ones_like(self._row, dtype=torch.bool)
        stays[tokens] = False
        values, shares = self._ranked(stays)
        value = float(self._row[tokens].max())
        costs = [math.inf]
        if 0 < self._params.top_k <= len(values):
            costs.append(value - float(values[self._params.top_k - 1]))
        if self._params.min_p > 0 and len(values):
            costs.append(value - (float(values[0]) + self._reach))
        if self._params.top_p < 1 and len(values):
            # Those down to a rank come before it, and hold enough.
            falls = (value - values).clamp(min=0)
            costs.append(_least(falls, -self._excess(shares.cumsum(dim=-1))))
        return max(0.0, min(costs))

    def _weights(self, values: Tensor) -> Tensor:
        return ((values - self._best) / self._params.temperature).exp()

    def _ranked(self, some: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of some tokens, the highest first, and their shares."""
        some = some & (self._row > -math.inf)
        values, order = self._row[some].sort(descending=True)
        return values, self._shares[some][order]

    def _excess(self, masses: Tensor) -> Tensor:
        """Return by how much masses exceed top-p, as differences of logits; negative below it."""
        top_p = self._params.top_p
        wanted = math.log(top_p / (1 - top_p))
        return self._params.temperature * (masses.clamp(0, 1).logit() - wanted)


def _least(moves: Tensor, excess: Tensor) -> float:
    """Return the least cost of any rank: of getting there, or of the mass before it."""
    return float(torch.maximum(moves, excess.clamp(min=0)).min())
