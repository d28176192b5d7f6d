"""Equal, tie or defect: the certificate must tell them apart, under argmax and under draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import Decoder
from decodekit.certificate import TOLERANCES, Divergence, compare, first_difference, margin
from decodekit.interfaces import Accepted, Budget, Proposal, StepOutcome
from decodekit.params import SamplingParams
from decodekit.plan import StepPlan
from decodekit.sampling import GreedySampler, PositionSampler, make_sampler, uniform
from decodekit.strategies.autoregressive import Autoregressive
from decodekit.tree import TokenTree
from tests.fakes import ToyAdapter, ToyCache, plain_decode

PROMPT = [3, 1, 4, 1, 5]
AT = 4  # where the models below go wrong


class Guess:
    """A strategy that guesses one token, any token, so that a pass has two rows."""

    max_nodes = 1

    def new_proposer(self, params: SamplingParams) -> Guess:
        return self

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        return Proposal(TokenTree.chain([0]).limited(nodes=budget.nodes, depth=budget.depth))

    def observe(self, outcome: StepOutcome) -> None:
        pass


class Noisy(ToyAdapter):
    """Its anchor's logits change a little where a pass has several rows, as in half precision.

    At the length ``len(PROMPT) + AT`` the best two tokens are ``gap`` apart, and the noise is
    ``noise`` for the second best.
    """

    def __init__(self, gap: float, noise: float) -> None:
        super().__init__()
        self.gap = gap
        self.noise = noise

    def logits_after(self, path: Sequence[int]) -> Tensor:
        logits = super().logits_after(path)
        if len(path) == len(PROMPT) + AT:
            logits[[2, 6]] = torch.tensor([9.0, 9.0 - self.gap])
        return logits

    def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
        logits = super().forward(plans, cache)
        plan = plans[0]
        if plan.tree and plan.prefix + len(plan.pending) == len(PROMPT) + AT:
            logits[0][0, 6] += self.noise
        return logits


def judged(model: ToyAdapter, strategy: Any, tolerance: float, **options: Any) -> Any:
    plain = Decoder(model, strategy=Autoregressive())
    options = {"max_new_tokens": 8, **options}
    expected = plain.generate(PROMPT, **options)
    got = Decoder(model, strategy=strategy).generate(PROMPT, **options)
    return compare(plain, PROMPT, expected, got, tolerance=tolerance, **options)


def test_equal_answers() -> None:
    verdict = judged(ToyAdapter(), Guess(), 0.1)
    assert (verdict.kind, verdict.tokens, verdict.divergence) == ("equal", 8, None)


@pytest.mark.parametrize(
    ("gap", "noise", "tolerance", "kind"),
    [
        (0.05, 0.01, 0.1, "equal"),  # the noise is too small to matter
        (0.05, 0.07, 0.1, "tie"),
        (0.05, 0.07, 0.02, "defect"),
        (0.5, 0.7, 0.1, "defect"),
        (0.0, 0.1, 0.0, "tie"),  # a tie to the last bit
    ],
)
def test_trap_07_a_tie_is_told_from_a_defect(
    gap: float, noise: float, tolerance: float, kind: str
) -> None:
    """Seen in transformers#39421: the last bits depend on the row count, so a tie may flip."""
    verdict = judged(Noisy(gap, noise), Guess(), tolerance)
    assert verdict.kind == kind
    if kind != "equal":
        assert verdict.divergence.position == AT
        assert (verdict.divergence.expected, verdict.divergence.got) == (2, 6)
        assert verdict.divergence.gap == pytest.approx(gap, abs=1e-5)


def test_the_gap_is_that_of_the_processed_scores() -> None:
    """Token 6 is 0.5 behind in the model's logits and level with the best after the bias."""
    options = {"logit_bias": {6: 0.49}}
    assert judged(Noisy(0.5, 0.02), Guess(), 0.1).kind == "equal"
    verdict = judged(Noisy(0.5, 0.02), Guess(), 0.1, **options)
    assert verdict.kind == "tie"
    assert verdict.divergence.gap == pytest.approx(0.01, abs=1e-5)


class Wrong:
    """A verifier that accepts whatever is proposed."""

    def verify(self, proposal: Proposal, target: Any) -> Any:
        nodes = tuple(range(len(proposal.tree)))
        last = nodes[-1] if nodes else -1
        yield from map(Accepted, proposal.tree.tokens, nodes)
        yield Accepted(target.after(last), None)


def test_a_broken_verifier_is_a_defect() -> None:
    model = ToyAdapter()
    plain = Decoder(model, strategy=Autoregressive())
    broken = Decoder(model, strategy=Guess(), verifier=Wrong())
    expected = plain.generate(PROMPT, max_new_tokens=8)
    got = broken.generate(PROMPT, max_new_tokens=8)
    verdict = compare(plain, PROMPT, expected, got, tolerance=0.1, max_new_tokens=8)
    assert verdict.kind == "defect"
    place = first_difference(expected.tokens, got.tokens)
    assert place is not None
    text = PROMPT + expected.tokens[:place]
    logits = model.logits_after(text)
    assert verdict.divergence is not None
    assert verdict.divergence.gap == pytest.approx(float(logits.max() - logits[got.tokens[place]]))


def test_an_answer_that_ends_early_is_a_defect_without_a_gap() -> None:
    model = ToyAdapter()
    plain = Decoder(model, strategy=Autoregressive())
    long, short = (plain.generate(PROMPT, max_new_tokens=count) for count in (6, 4))
    last = plain_decode(model, PROMPT, max_new_tokens=6)[4]
    for one, other, tokens in ((long, short, (last, None)), (short, long, (None, last))):
        verdict = compare(plain, PROMPT, one, other, tolerance=99.0)
        assert verdict.kind == "defect"
        assert verdict.divergence == Divergence(
            position=4, expected=tokens[0], got=tokens[1], gap=None
        )


# --- margins under draws ------------------------------------------------------------------------


def params_with(**settings: Any) -> tuple[SamplingParams, float]:
    """Return params whose draw at position 9 lies well inside (0.1, 0.9), and that draw."""
    for seed in range(100):
        number = uniform(seed, 9)
        if 0.3 < number < 0.7:
            return SamplingParams(temperature=1.0, seed=seed, **settings), number
    raise AssertionError


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("other", "nearer"), [(0, [1.0, -1.0, -1.0]), (2, [-1.0, -1.0, 1.0])])
def test_under_a_draw_the_gap_is_what_moves_the_border_to_the_draw(
    temperature: float, other: int, nearer: list[float]
) -> None:
    """Every logit moved by half of it, in the worst directions, is just what it takes."""
    params, number = params_with()
    params.temperature = temperature
    probs = torch.tensor([number - 0.01, 0.21, 0.8 - number], dtype=torch.float64)
    sampler = PositionSampler(params)
    row = probs.log() * temperature  # the draw is just inside token 1
    assert sampler.choose(row[None], [9]) == [1]
    gap = margin(row, sampler, 9, other)
    for share, token in ((0.495, 1), (0.505, other)):
        moved = row + torch.tensor(nearer, dtype=torch.float64) * gap * share
        assert sampler.choose(moved[None], [9]) == [token]
    assert margin(row, sampler, 9, 1) == 0.0


def test_an_impossible_token_is_no_tie() -> None:
    params, _ = params_with(top_k=2)
    row = torch.tensor([2.0, 1.0, -5.0])
    assert margin(row, PositionSampler(params), 9, 2) == pytest.approx(6.0)
    plain, _ = params_with()
    masked = torch.tensor([2.0, 1.0, -math.inf])
    assert margin(masked, PositionSampler(plain), 9, 2) == math.inf


@pytest.mark.parametrize(
    ("settings", "row", "gap"),
    [
        ({"top_k": 1}, [1.0, 0.995, -3.0], 0.005),
        ({"min_p": 0.5}, [0.0, math.log(0.4999), -9.0], math.log(0.5 / 0.4999)),
        ({"min_p": 0.5}, [0.0, math.log(0.5) + 1e-6, -9.0], 1e-6),
        ({"top_p": 0.6}, [math.log(0.601), math.log(0.3), math.log(0.099)], 0.00416),
        ({"top_p": 0.6}, [math.log(0.599), math.log(0.3), math.log(0.101)], 0.00416),
        # Of the two that top-k leaves, the first has just more than top-p asks for.
        ({"top_k": 2, "top_p": 0.6}, [math.log(0.3001), math.log(0.2), math.log(0.1999)], 0.0003),
    ],
)
def test_a_filter_that_nearly_let_another_token_in_is_a_tie(
    settings: dict[str, Any], row: list[float], gap: float
) -> None:
    params, _ = params_with(**settings)
    found = margin(torch.tensor(row), PositionSampler(params), 9, 1)
    assert found == pytest.approx(gap, rel=0.2, abs=1e-7)


def test_under_argmax_the_gap_is_the_difference_of_logits() -> None:
    assert margin(torch.tensor([0.5, 2.0, 1.75]), GreedySampler(), 9, 2) == 0.25


def test_equal_under_draws_too() -> None:
    assert isinstance(make_sampler(SamplingParams(temperature=1.0)), PositionSampler)
    verdict = judged(ToyAdapter(), Guess(), 1e-6, temperature=1.0, seed=3)
    assert verdict.kind == "equal"


def test_every_dtype_that_a_model_can_have_has_a_tolerance() -> None:
    assert set(TOLERANCES) == {"float64", "float32", "bfloat16", "float16"}
    assert TOLERANCES["float64"] < TOLERANCES["float32"] < TOLERANCES["float16"]


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [([], [], None), ([1], [1], None), ([1], [2], 0), ([1, 2], [1], 1), ([1], [1, 2], 1)],
)
def test_first_difference(left: list[int], right: list[int], place: int | None) -> None:
    assert first_difference(left, right) == place
