"""Is an answer what the model says token by token, and if not, is it a numerical tie or a defect?

In exact arithmetic every strategy gives the tokens of autoregressive decoding. On a machine a row's
logits depend in their last bits on how many rows are in the pass, and where the best two tokens are
closer than that, either may come out. That is a *tie*, and everything else a *defect*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from decodekit.decoder import Decoder
from decodekit.params import SamplingParams
from decodekit.result import GenerationResult
from decodekit.sampling import Sampler, uniform

__all__ = ["TOLERANCES", "Divergence", "Verdict", "compare", "first_difference", "margin"]

TOLERANCES = {"float64": 2e-6, "float32": 1e-4, "bfloat16": 1.0, "float16": 0.1}
"""The largest gap of a tie, by dtype; see ``margin``. Two to four times as much as the gap between
two of the five best tokens was seen to change with the number of rows; see docs/lossless.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where two answers differ.

    Attributes:
        position: The new token's index, from 0.
        expected: The token of autoregressive decoding; None if its answer ends before.
        got: The other token; None if the other answer ends before.
        gap: By how little autoregressive decoding preferred its token; see ``margin``. None if one
            of the answers ends, which no tie explains.
    """

    position: int
    expected: int | None
    got: int | None
    gap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How an answer compares with that of autoregressive decoding.

    Attributes:
        kind: ``equal``, ``tie`` or ``defect``.
        tokens: New tokens of the autoregressive answer.
        divergence: Where they part; None if they are equal.
    """

    kind: Literal["equal", "tie", "defect"]
    tokens: int
    divergence: Divergence | None = None


def compare(
    reference: Decoder,
    prompt: Sequence[int],
    expected: GenerationResult,
    got: GenerationResult,
    *,
    tolerance: float,
    **options: Any,
) -> Verdict:
    """Compare two answers to one prompt.

    Args:
        reference: The autoregressive decoder that gave ``expected``; where the answers part, it is
            asked again.
        prompt: Token ids.
        expected: Its answer.
        got: The answer to be judged.
        tolerance: The largest gap of a tie.
        options: The options of both requests.
    """
    place = first_difference(expected.tokens, got.tokens)
    if place is None:
        return Verdict(kind="equal", tokens=len(expected.tokens))
    one, other = (
        result.tokens[place] if place < len(result.tokens) else None for result in (expected, got)
    )
    gap = None
    if one is not None and other is not None:
        row, sampler = _row_at(reference, prompt, len(prompt) + place, options)
        gap = margin(row, sampler, len(prompt) + place, other)
    divergence = Divergence(position=place, expected=one, got=other, gap=gap)
    tie = gap is not None and gap <= tolerance
    return Verdict(
        kind="tie" if tie else "defect", tokens=len(expected.tokens), divergence=divergence
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first place where two runs of tokens differ; None if they are equal."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def margin(row: Tensor, sampler: Sampler, position: int, other: int) -> float:
    """Return by how much two logits would have to draw closer for ``other`` to come out.

    Under greedy decoding the difference of its logit to the best one. Under sampling what moves the
    border of its share of the distribution to the draw; or, if that is less, what makes a filter
    let in or leave out one token more. Always in units of logits, so that one tolerance fits all.

    Args:
        row: [V], the logits that the token was chosen from, processors and constraint applied.
        sampler: What chose it.
        position: Its absolute position.
        other: The token that the other answer has there.
    """
    params = getattr(sampler, "params", None)
    if not isinstance(params, SamplingParams):
        return float(row.max() - row[other])
    share = sampler.probabilities(row[None])[0].double()
    number = uniform(sampler.seed, position)
    gap = math.inf
    if share[other] > 0:
        end = float(share[: other + 1].sum())
        start = end - float(share[other])
        border = start if number < start else min(end, number)
        gap = params.temperature * abs(_log_odds(border) - _log_odds(number))
    return min(gap, _filter_gap(row, params))


def _filter_gap(row: Tensor, params: SamplingParams) -> float:
    """Return how close, in logits, a filter was to keeping one token more or less."""
    ranked = row[row > -math.inf].double().sort(descending=True).values
    gaps = [math.inf]
    if 0 < params.top_k < len(ranked):
        gaps.append(float(ranked[params.top_k - 1] - ranked[params.top_k]))
        ranked = ranked[: params.top_k]
    if params.min_p > 0:
        least = ranked[0] + params.temperature * math.log(params.min_p)
        gaps.append(float((ranked - least).abs().min()))
    if params.top_p < 1:
        masses = (ranked / params.temperature).softmax(dim=-1).cumsum(dim=-1)[:-1].tolist()
        wanted = _log_odds(params.top_p)
        gaps += [params.temperature * abs(_log_odds(mass) - wanted) for mass in masses]
    return min(gaps)


def _log_odds(share: float) -> float:
    """Return the logit of a probability: it changes by as much as the logits on its two sides."""
    if share <= 0 or share >= 1:
        return math.copysign(math.inf, share - 0.5)
    return math.log(share / (1 - share))


class _Recorder:
    """A sampler that keeps the row it is asked about at one position."""

    def __init__(self, sampler: Sampler, position: int) -> None:
        self._sampler = sampler
        self._position = position
        self.seed = sampler.seed
        self.row: Tensor | None = None

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        if list(positions) == [self._position]:
            self.row = logits[0].clone()
        return self._sampler.choose(logits, positions)

    def probabilities(self, logits: Tensor) -> Tensor:
        return self._sampler.probabilities(logits)


def _row_at(
    reference: Decoder, prompt: Sequence[int], position: int, options: dict[str, Any]
) -> tuple[Tensor, Sampler]:
    """Decode again up to ``position``; return the row its token is chosen from, and the sampler."""
    options = {**options, "max_new_tokens": position - len(prompt) + 1}
    answer = reference.begin(list(prompt), **options)
    sampler = answer.state.sampler
    recorder = answer.state.sampler = _Recorder(sampler, position)
    for records in reference.steps([answer]):
        answer.add(records[0])
    assert recorder.row is not None, "autoregressive decoding did not come as far again"
    return recorder.row.to(torch.promote_types(recorder.row.dtype, torch.float32)).cpu(), sampler
