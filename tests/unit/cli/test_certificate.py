"""Equal, tie or defect: the certificate must tell them apart, under argmax and under draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import Decoder
from decodekit.cli.verify.certificate import TOLERANCES, Divergence, compare
from decodekit.decoder.runs import first_difference
from decodekit.interfaces import Accepted, Budget, Proposal, StepOutcome
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import TokenTree
from decodekit.strategies.autoregressive import Autoregressive
from tests.support.fakes import PieceTokenizer, ToyAdapter, ToyCache, plain_decode

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
    assert (verdict.kind, verdict.tokens, verdict.divergences) == ("equal", 8, ())


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
        (parting,) = verdict.divergences
        assert (parting.position, parting.expected, parting.got) == (AT, 2, 6)
        assert parting.gap == pytest.approx(gap, abs=1e-5)


def test_what_follows_a_tie_is_judged_too() -> None:
    """The text after a tie is another one; it must be what the model says after *that* text."""
    verdict = judged(Noisy(0.05, 0.07), Guess(), 0.1)
    assert (verdict.kind, len(verdict.divergences)) == ("tie", 1)

    class Worse(Noisy):
        def forward(self, plans: Sequence[StepPlan], cache: ToyCache) -> list[Tensor]:
            logits = super().forward(plans, cache)
            plan = plans[0]
            if plan.tree and plan.prefix + len(plan.pending) > len(PROMPT) + AT + 1:
                logits[0] = logits[0].flip(-1)
            return logits

    verdict = judged(Worse(0.05, 0.07), Guess(), 0.1)
    assert verdict.kind == "defect"
    tie, defect = verdict.divergences
    assert tie.position == AT < AT + 1 < defect.position
    assert defect.gap > 0.1


def test_the_gap_is_that_of_the_processed_scores() -> None:
    """Token 6 is 0.5 behind in the model's logits and level with the best after the bias."""
    options = {"logit_bias": {6: 0.49}}
    assert judged(Noisy(0.5, 0.02), Guess(), 0.1).kind == "equal"
    verdict = judged(Noisy(0.5, 0.02), Guess(), 0.1, **options)
    assert verdict.kind == "tie"
    assert verdict.divergences[0].gap == pytest.approx(0.01, abs=1e-5)


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
    (parting,) = verdict.divergences
    assert parting.gap == pytest.approx(float(logits.max() - logits[got.tokens[place]]))


def test_an_answer_that_ends_early_is_a_defect_without_a_gap() -> None:
    model = ToyAdapter()
    plain = Decoder(model, strategy=Autoregressive())
    long, short = (plain.generate(PROMPT, max_new_tokens=count) for count in (6, 4))
    last = plain_decode(model, PROMPT, max_new_tokens=6)[4]
    for one, other, tokens in ((long, short, (last, None)), (short, long, (None, last))):
        count = len(one.tokens)
        verdict = compare(plain, PROMPT, one, other, tolerance=99.0, max_new_tokens=count)
        assert verdict.kind == "defect"
        assert verdict.divergences == (
            Divergence(position=4, expected=tokens[0], got=tokens[1], gap=None),
        )


def test_a_token_that_is_impossible_has_no_gap() -> None:
    """No change of the logits leads to it, and JSON knows no infinity."""
    plain = Decoder(ToyAdapter(), strategy=Autoregressive())
    options: dict[str, Any] = {"max_new_tokens": 6, "suppress_tokens": [7]}
    expected = plain.generate(PROMPT, **options)
    got = replace(expected, tokens=[*expected.tokens[:3], 7, *expected.tokens[4:]])
    verdict = compare(plain, PROMPT, expected, got, tolerance=99.0, **options)
    assert verdict.kind == "defect"
    assert verdict.divergences[-1].gap is None


@pytest.mark.parametrize("token", [-11, 99])
def test_a_token_that_does_not_exist_is_a_defect(token: int) -> None:
    plain = Decoder(ToyAdapter(), strategy=Autoregressive())
    expected = plain.generate(PROMPT, max_new_tokens=4)
    got = replace(expected, tokens=[*expected.tokens[:3], token])
    verdict = compare(plain, PROMPT, expected, got, tolerance=99.0, max_new_tokens=4)
    assert (verdict.kind, verdict.divergences[-1].gap) == ("defect", None)


def test_a_text_is_judged_as_the_text_that_it_was() -> None:
    """What follows a text begins with a space, what follows its token ids does not."""

    class Tokens(PieceTokenizer):
        chat_template = None

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [3, 1, 4]}

    tokenizer = Tokens([f"▁{chr(97 + token)}" for token in range(11)])
    plain = Decoder(ToyAdapter(), tokenizer, strategy=Autoregressive())
    (first,) = plain.generate("x", max_new_tokens=1).tokens
    options: dict[str, Any] = {"stop": [f" {chr(97 + first)}"], "max_new_tokens": 6}
    expected = plain.generate("x", **options)
    assert expected.finish_reason == "stop"
    other = replace(expected, tokens=[*expected.tokens, 0])
    verdict = compare(plain, "x", expected, other, tolerance=0.1, **options)
    assert verdict.divergences == (Divergence(position=1, expected=None, got=0, gap=None),)


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("tolerance", [1e-4, 0.1])
def test_an_answer_drawn_with_another_seed_is_a_defect(
    filters: dict[str, Any], temperature: float, tolerance: float
) -> None:
    """However close to a filter's border some tokens are: that has to explain the other token."""
    plain = Decoder(ToyAdapter(200), strategy=Autoregressive())
    options = {"max_new_tokens": 30, "temperature": temperature, **filters}
    for seed in range(6):
        expected = plain.generate(PROMPT, **options, seed=seed)
        got = plain.generate(PROMPT, **options, seed=seed + 100)
        verdict = compare(plain, PROMPT, expected, got, tolerance=tolerance, **options, seed=seed)
        assert verdict.kind == "defect"


def test_equal_under_draws_too() -> None:
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
