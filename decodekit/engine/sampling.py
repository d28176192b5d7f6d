"""How the target model chooses a token after a row: argmax, or a draw keyed by the position.

Under sampling each token has a random number at each absolute position, made from (seed, position,
token), and the token with the largest ratio of probability to number is chosen: the exponential
race, or Gumbel-max trick (Maddison et al., 2014, arXiv 1411.0030). So the text is a function of the
model, the prompt and the seed alone: every strategy, window and backend gives the *same tokens*,
and a window of Jacobi iterations converges under sampling just as it does under argmax. What noise
there is in the logits matters as little as under argmax, too: only that of the best two counts.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from decodekit.engine.filters import require_finite, warp
from decodekit.engine.noise import PositionNoise
from decodekit.interfaces.adapter import HasArgmax, ModelAdapter
from decodekit.interfaces.sampling_params import SamplingParams

__all__ = [
    "GreedySampler",
    "Largest",
    "PositionSampler",
    "Sampler",
    "largest_of",
    "make_sampler",
]


Largest = Callable[[Tensor], "tuple[Tensor, Tensor] | None"]
"""What ``HasArgmax.largest`` is: the largest number of each row and its place, or None."""

_BLOCK = 256
"""Numbers of a row whose maximum is taken in one go."""

_FEW = 4
"""For so few rows the steps of doing it block by block take longer than they save."""


class Sampler(Protocol):
    """Chooses the target model's token after rows of logits."""

    @property
    def seed(self) -> int:
        """The key of the draws."""
        ...

    @property
    def in_bulk(self) -> bool:
        """Whether a few rows more in a call of ``choose`` cost less than a further call."""
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

    def scores(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Return what ``choose`` takes the largest of, [R, V]: how well each token does.

        The arguments and errors are those of ``choose``.
        """
        ...

    def probabilities(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the distribution that is drawn from after each row, [R, V].

        In float32, or float64 where the logits are; rows sum to about 1. The arguments and errors
        are those of ``choose``.
        """
        ...


class GreedySampler:
    """The most probable token; of equals, the one with the lowest id.

    Args:
        largest: Finds the largest numbers faster than torch; None for torch.
    """

    seed = 0
    in_bulk = True

    def __init__(self, largest: Largest | None = None) -> None:
        self._largest = largest

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return the argmax of each row; see ``Sampler.choose``."""
        best, tokens = _argmax(logits, self._largest)
        require_finite(best)
        return tokens.tolist()

    def scores(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the logits; see ``Sampler.scores``."""
        require_finite(logits.amax(dim=-1))
        return logits

    def probabilities(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Return 1 for the argmax and 0 for all else; see ``Sampler.probabilities``."""
        best, tokens = _argmax(logits, self._largest)
        require_finite(best)
        return torch.zeros(logits.shape, device=logits.device).scatter_(-1, tokens[:, None], 1.0)


class PositionSampler:
    """Draws from the warped distribution with random numbers keyed by the absolute position.

    Args:
        params: The temperature, above 0, the filters and the seed.
        largest: As for ``GreedySampler``.
    """

    in_bulk = False  # each row has V random numbers

    def __init__(self, params: SamplingParams, largest: Largest | None = None) -> None:
        self.params = params
        self._largest = largest
        self.seed = params.seed
        self._noise = PositionNoise(params.seed)

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return one draw per row; see ``Sampler.choose``."""
        return _argmax(self.scores(logits, positions), self._largest)[1].tolist()

    def scores(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Return each token's probability over its random number, 0 for none at all.

        See ``Sampler.scores``. A token wins with the chance of its probability, since the minimum
        of exponential numbers with rates p is at a token with the chance of its share of p.
        """
        probs = warp(logits, self.params, positions)
        return probs.div_(self._noise.rows(positions, like=probs))

    def probabilities(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the warped distribution; see ``Sampler.probabilities``."""
        probs = warp(logits, self.params, positions)
        return probs / probs.sum(dim=-1, keepdim=True)


def _argmax(rows: Tensor, largest: Largest | None) -> tuple[Tensor, Tensor]:
    """Return the largest number of each row [R, V] and its place, the first of equals, both [R].

    A row with NaN has NaN as its largest. On a CPU torch looks for a place one number at a time,
    but for a maximum many at a time: so first the maxima of blocks, and then in one block only.
    """
    found = None if largest is None else largest(rows)
    if found is not None:
        return found
    blocks, rest = divmod(rows.shape[-1], _BLOCK)
    if rows.device.type != "cpu" or blocks < 2 or len(rows) <= _FEW:
        best, places = rows.max(dim=-1)
        return best, places
    tops = rows[:, : blocks * _BLOCK].reshape(len(rows), blocks, _BLOCK).amax(dim=-1)
    if rest:
        tops = torch.cat([tops, rows[:, blocks * _BLOCK :].amax(dim=-1, keepdim=True)], dim=-1)
    best, block = tops.max(dim=-1)
    inside = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=rows.device)
    inside.clamp_(max=rows.shape[-1] - 1)  # the last block may be shorter
    return best, block * _BLOCK + rows.gather(-1, inside).argmax(dim=-1)


def largest_of(adapter: ModelAdapter) -> Largest | None:
    """Return how an adapter finds the largest logits; None where it leaves that to torch."""
    return adapter.largest if isinstance(adapter, HasArgmax) else None


def make_sampler(params: SamplingParams, largest: Largest | None = None) -> Sampler:
    """Return the sampler that ``params`` describes; ``largest`` is as for ``GreedySampler``."""
    if params.temperature > 0:
        return PositionSampler(params, largest)
    return GreedySampler(largest)
