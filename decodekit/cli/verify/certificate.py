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

from decodekit.cli.verify.margin import margin
from decodekit.decoder.decoder import Decoder
from decodekit.decoder.prompt import Prompt
from decodekit.decoder.result import GenerationResult
from decodekit.decoder.runs import first_difference
from decodekit.engine.sampling import Sampler

__all__ = [
    "TOLERANCES",
    "Divergence",
    "Verdict",
    "compare",
    "dtype_of",
    "judge",
    "tolerance_for",
]

TOLERANCES = {"float64": 2e-6, "float32": 1e-4, "bfloat16": 0.6, "float16": 0.06}
"""The largest gap of a tie, by dtype; see ``margin``. A little more than the gap between two of the
five best tokens was seen to change with the number of rows; see docs/lossless.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A place where an answer has another token than autoregressive decoding has after its prefix.

    Attributes:
        position: The new token's index, from 0.
        expected: The token of autoregressive decoding; None if its answer ends before.
        got: The answer's token; None if the answer ends before.
        gap: By how little autoregressive decoding preferred its token; see ``margin``. None if no
            change of the logits leads to the other one, or if one of the answers ends.
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
        tokens: New tokens of the answer that was judged.
        divergences: Every tie, and the first place, if any, that no tie explains. What follows a
            tie is judged by what the model says after the answer's own tokens.
    """

    kind: Literal["equal", "tie", "defect"]
    tokens: int
    divergences: tuple[Divergence, ...] = ()


def compare(
    reference: Decoder,
    prompt: Prompt,
    expected: GenerationResult,
    got: GenerationResult,
    *,
    tolerance: float,
    **options: Any,
) -> Verdict:
    """Compare two answers to one prompt.

    Args:
        reference: The autoregressive decoder that gave ``expected``; where the answers part, it
            decodes again, along the answer that is judged.
        prompt: What both were asked, in the same form: what follows a text is not always what
            follows its token ids.
        expected: Its answer.
        got: The answer to be judged.
        tolerance: The largest gap of a tie.
        options: The options of both requests.
    """
    if first_difference(expected.tokens, got.tokens) is None:
        return Verdict(kind="equal", tokens=len(got.tokens))
    return judge(reference, prompt, got, tolerance=tolerance, **options)


def judge(
    reference: Decoder,
    prompt: Prompt,
    got: GenerationResult,
    *,
    tolerance: float,
    **options: Any,
) -> Verdict:
    """Judge every token of an answer by what a decoder says after the tokens before it.

    The arguments are those of ``compare``.
    """
    answer = reference.begin(prompt, **options)
    start = len(answer.state.committed)
    referee = _Referee(answer.state.sampler, start, got.tokens, tolerance)
    answer.state.sampler = referee
    for records in reference.steps([answer]):
        answer.add(records[0])
        if referee.defect or referee.is_over:
            break
    divergences = list(referee.divergences)
    kind: Literal["equal", "tie", "defect"] = "tie" if divergences else "equal"
    if referee.defect:
        kind = "defect"
    else:
        said = answer.result.tokens
        end = first_difference(said, got.tokens)
        if end is not None:  # one of them goes on
            kind = "defect"
            one, other = (side[end] if end < len(side) else None for side in (said, got.tokens))
            divergences.append(Divergence(position=end, expected=one, got=other, gap=None))
    return Verdict(kind=kind, tokens=len(got.tokens), divergences=tuple(divergences))


def dtype_of(decoder: Decoder) -> str:
    """Return the name of the dtype of a decoder's model; ``float32`` if it does not say."""
    model = getattr(decoder.adapter, "model", None)
    return str(getattr(model, "dtype", "float32")).removeprefix("torch.")


def tolerance_for(decoder: Decoder) -> float:
    """Return the largest gap of a tie for the dtype of a decoder's model."""
    return TOLERANCES.get(dtype_of(decoder), TOLERANCES["float32"])


class _Referee:
    """A sampler that lets the tokens of an answer stand wherever they are ties.

    Args:
        sampler: Says which token is right.
        start: Tokens of the prompt.
        answer: The new tokens that are judged.
        tolerance: The largest gap of a tie.
    """

    in_bulk = False  # a row that nobody asks about must not be judged

    def __init__(
        self, sampler: Sampler, start: int, answer: Sequence[int], tolerance: float
    ) -> None:
        self._sampler = sampler
        self._start = start
        self._answer = answer
        self._tolerance = tolerance
        self.seed = sampler.seed
        self.divergences: list[Divergence] = []
        self.defect = False
        self.is_over = False  # the answer: a token was asked for that it does not have

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        chosen = self._sampler.choose(logits, positions)
        return [
            self._judge(row, position, token)
            for row, position, token in zip(logits, positions, chosen, strict=True)
        ]

    def scores(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return self._sampler.scores(logits, positions)

    def probabilities(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return self._sampler.probabilities(logits, positions)

    def _judge(self, row: Tensor, position: int, token: int) -> int:
        """Return the token that decoding goes on with: the answer's, if it may stand."""
        place = position - self._start
        self.is_over = place >= len(self._answer)
        if self.defect or place >= len(self._answer) or self._answer[place] == token:
            return token
        other = self._answer[place]
        exact = row.to(torch.promote_types(row.dtype, torch.float32)).cpu()
        gap = margin(exact, self._sampler, position, other)
        self.divergences.append(
            Divergence(
                position=place,
                expected=token,
                got=other,
                gap=gap if math.isfinite(gap) else None,
            )
        )
        self.defect = not (gap <= self._tolerance and math.isfinite(gap))
        return token if self.defect else other
