"""By how much two logits would have to draw closer for another token to come out.

V is the size of the vocabulary. All costs are differences of two logits, so that one tolerance fits
argmax, draws and filters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decodekit.noise import exponentials
from decodekit.params import SamplingParams
from decodekit.sampling import Sampler

__all__ = ["margin"]


def margin(row: Tensor, sampler: Sampler, position: int, other: int) -> float:
    """Return what it takes for ``other`` to be chosen; 0 if it is, infinity if nothing will do.

    Under greedy decoding it is the distance of its logit to the best one. Under sampling ``other``
    has to be kept by the filters, and every token that does better in the draw has to fall behind
    it or to be dropped by a filter; the hardest of these counts.

    Args:
        row: [V], the logits that the token was chosen from, processors and constraint applied.
        sampler: What chose it.
        position: Its absolute position.
        other: The token to be chosen instead.
    """
    params = getattr(sampler, "params", None)
    if not isinstance(params, SamplingParams):
        return float(row.max() - row[other])
    if not row[other] > -math.inf:
        return math.inf
    row = row.double()
    filters = _Filters(row, params)
    noise = exponentials(params.seed, position, len(row)).to(row.device)
    race = row - params.temperature * noise.log()  # where the largest wins, in units of logits
    gap = filters.cost_to_keep(other)
    ahead = race - race[other]
    for lead, token in zip(*(part.tolist() for part in ahead.sort(descending=True)), strict=True):
        if lead <= gap:
            break
        gap = max(gap, min(lead, filters.cost_to_drop(token)))
    return gap


class _Filters:
    """How far tokens are from being kept or dropped by top-k, top-p and min-p.

    Args:
        row: [V] in float64.
        params: The temperature and the filters.
    """

    def __init__(self, row: Tensor, params: SamplingParams) -> None:
        self._row = row
        self._temperature = params.temperature
        ranked = row[row > -math.inf].sort(descending=True).values
        self._best = float(ranked[0])
        self._second = float(ranked[1]) if len(ranked) > 1 else -math.inf
        self._last = self._next = -math.inf  # the last that top-k keeps, the first that it drops
        if 0 < params.top_k < len(ranked):
            self._last = float(ranked[params.top_k - 1])
            self._next = float(ranked[params.top_k])
            ranked = ranked[ranked >= self._last]
        self._reach = params.temperature * math.log(params.min_p) if params.min_p else -math.inf
        self._ranked = ranked  # [K], what top-k keeps
        self._top_p = params.top_p
        # [K], the share of a token, and of it and all before it.
        self._shares = ((ranked - self._best) / params.temperature).softmax(dim=-1)
        self._masses = self._shares.cumsum(dim=-1)

    def cost_to_keep(self, token: int) -> float:
        """Return what it takes for every filter to keep ``token``; 0 if they do."""
        value = float(self._row[token])
        costs = [self._last - value, self._best + self._reach - value]
        if self._top_p < 1:
            # It may also gain ranks: each rank has the mass of those before it.
            climb = (self._ranked - value).clamp(min=0)
            costs.append(_smallest(climb, self._excess(self._masses - self._shares)))
        return max(0.0, *costs)

    def cost_to_drop(self, token: int) -> float:
        """Return what it takes for a filter to drop ``token``; 0 if one does."""
        value = float(self._row[token])
        rival = self._second if value == self._best else self._best
        costs = [value - self._next, value - (rival + self._reach)]
        if self._top_p < 1:
            share = math.exp((value - float(self._ranked[0])) / self._temperature)
            share *= float(self._shares[0])
            # It may also lose ranks: those down to each rank are then before it, but not itself.
            fall = (value - self._ranked).clamp(min=0)
            before = torch.where(fall > 0, self._masses - share, self._masses - self._shares)
            costs.append(_smallest(fall, -self._excess(before)))
        return max(0.0, min(costs))

    def _excess(self, masses: Tensor) -> Tensor:
        """Return by how much masses exceed top-p, as differences of logits; negative below it."""
        wanted = math.log(self._top_p / (1 - self._top_p))
        return self._temperature * (masses.clamp(0, 1).logit() - wanted)


def _smallest(moves: Tensor, excess: Tensor) -> float:
    """Return the least cost of any rank: of getting there, or of the mass before it."""
    return float(torch.maximum(moves, excess.clamp(min=0)).min())
