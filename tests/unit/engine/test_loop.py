"""The decode loop against ten plain lines, under proposers that are right, wrong and random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit.engine.detokenizer import IncrementalText
from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.loop import StepRecord
from decodekit.engine.runner import LocalRunner
from decodekit.engine.sampling import make_sampler
from decodekit.engine.stopping import StopRules
from decodekit.errors import GenerationError, TreeError
from decodekit.interfaces import Budget, Proposal, Proposer, StepOutcome
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.strategies.autoregressive import Autoregressive
from tests.support.fakes import (
    ByteTokenizer,
    OracleProposer,
    RandomProposer,
    ToyAdapter,
    ToyCache,
    decode_one,
    plain_decode,
)

PROMPT = [3, 1, 4, 1, 5]
DEPTH = 4  # N - 1: nodes of an oracle's chain
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=11)


def run(
    model: ToyAdapter,
    proposer: Proposer,
    *,
    max_new_tokens: int = 12,
    params: SamplingParams = GREEDY,
    prompt: Sequence[int] = PROMPT,
    max_nodes: int = 16,
    text: IncrementalText | None = None,
    runner: LocalRunner | None = None,
) -> tuple[list[StepRecord], StopRules]:
    limit = model.max_positions
    rules = StopRules(
        max_new_tokens=max_new_tokens,
        room=None if limit is None else limit - len(prompt),
        eos_token_ids=model.eos_token_ids,
        text=text,
    )
    records = decode_one(
        prompt,
        runner=runner or LocalRunner(model),
        proposer=proposer,
        verifier=ExactMatchVerifier(),
        sampler=make_sampler(params),
        rules=rules,
        max_nodes=max_nodes,
    )
    return list(records), rules


def emitted(records: Sequence[StepRecord]) -> list[int]:
    return [token for record in records for token in record.tokens]


def truth(
    model: ToyAdapter,
    *,
    max_new_tokens: int = 12,
    params: SamplingParams = GREEDY,
    prompt: Sequence[int] = PROMPT,
) -> list[int]:
    sampler = make_sampler(params)

    def choose(logits: Tensor, position: int) -> int:
        return sampler.choose(logits[None], [position])[0]

    return plain_decode(model, prompt, max_new_tokens=max_new_tokens, choose=choose)


def oracle(model: ToyAdapter, params: SamplingParams = GREEDY, **options: Any) -> OracleProposer:
    """Return a proposer of the true text, which it knows beyond every end."""
    endless = ToyAdapter(model.vocab_size, model.seed, context=model.context)
    text = PROMPT + truth(endless, max_new_tokens=40, params=params)
    return OracleProposer(text, depth=DEPTH, vocab_size=model.vocab_size, **options)


def guesser(model: ToyAdapter, text: Sequence[int] | None = None) -> RandomProposer:
    return RandomProposer(seed=1, vocab_size=model.vocab_size, nodes=9, text=text)


Make = Callable[[ToyAdapter, SamplingParams], Proposer]

PROPOSERS: dict[str, Make] = {
    "none": lambda _model, _params: Autoregressive(),
    "oracle": oracle,
    **{f"wrong at {place}": partial(oracle, wrong_at=place) for place in range(DEPTH)},
    "random": lambda model, _params: guesser(model),
    "random and true": lambda model, params: guesser(model, oracle(model, params).text),
}


@pytest.fixture(params=PROPOSERS)
def make(request: pytest.FixtureRequest) -> Make:
    return PROPOSERS[request.param]


# --- the same tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("vocab_size", "context"), [(11, None), (6, 2), (2, 1)])
def test_every_proposer_gives_the_tokens_of_plain_decoding(
    make: Make, params: SamplingParams, vocab_size: int, context: int | None
) -> None:
    for seed in range(2):
        model = ToyAdapter(max(vocab_size, 6), seed, context=context)
        records, rules = run(model, make(model, params), params=params)
        assert emitted(records) == truth(model, params=params)
        assert rules.finish_reason == "length"


@pytest.mark.parametrize("budget", range(2 * (DEPTH + 1) + 1))
def test_every_budget_is_met_exactly(make: Make, budget: int) -> None:
    model = ToyAdapter()
    records, rules = run(model, make(model, GREEDY), max_new_tokens=budget)
    assert emitted(records) == truth(model, max_new_tokens=budget)
    assert sum(len(record.tokens) for record in records) == budget == len(rules.tokens)
    assert rules.finish_reason == "length"


@pytest.mark.parametrize("room", range(1, 12))
def test_the_last_position_of_the_model_is_used_and_none_beyond(make: Make, room: int) -> None:
    model = ToyAdapter(max_positions=len(PROMPT) + room)
    records, rules = run(model, make(model, GREEDY), max_new_tokens=9)
    assert emitted(records) == truth(ToyAdapter(), max_new_tokens=min(room, 9))
    assert rules.finish_reason == ("capacity" if room < 9 else "length")


@pytest.mark.parametrize("place", range(10))
def test_the_text_ends_at_an_end_of_text_token_wherever_it_is_in_a_run(
    make: Make, place: int
) -> None:
    tokens = truth(ToyAdapter(), max_new_tokens=10)
    eos = tokens[place]
    model = ToyAdapter(eos={eos, *(set(range(11)) - set(tokens))})
    records, rules = run(model, make(model, GREEDY))
    assert emitted(records) == tokens[: tokens.index(eos) + 1]
    assert rules.finish_reason == "eos"


@pytest.mark.parametrize("place", range(9))
def test_a_stop_string_over_two_tokens_ends_the_text_wherever_it_is(make: Make, place: int) -> None:
    tokens = truth(ToyAdapter(26), max_new_tokens=10)
    letters = ByteTokenizer([bytes([byte]) for byte in range(97, 123)])
    full = letters.decode(tokens)
    stop = full[place : place + 2]
    end = full.index(stop)
    model = ToyAdapter(26)
    text = IncrementalText(letters, stop=[stop])
    records, rules = run(model, make(model, GREEDY), text=text)
    assert emitted(records) == tokens[: end + 2]
    assert text.text == full[:end]
    assert rules.finish_reason == "stop"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(length: int) -> None:
    model = ToyAdapter()
    prompt = PROMPT[:length]
    records, _ = run(model, guesser(model), prompt=prompt)
    assert emitted(records) == truth(model, prompt=prompt)


# --- what a step does ----------------------------------------------------------------------------


def test_an_oracle_gets_its_whole_chain_and_a_bonus_at_every_step() -> None:
    model = ToyAdapter()
    records, _ = run(model, oracle(model), max_new_tokens=15)
    assert [len(record.tokens) for record in records] == [DEPTH + 1] * 3
    assert [record.nodes for record in records] == [DEPTH] * 3
    assert [plan.rows for (plan,) in model.forwards] == [5 + DEPTH, 1 + DEPTH, 1 + DEPTH]


@pytest.mark.parametrize("place", range(DEPTH))
def test_a_chain_wrong_at_one_place_yields_what_comes_before_it(place: int) -> None:
    model = ToyAdapter()
    records, _ = run(model, oracle(model, wrong_at=place), max_new_tokens=3 * (place + 1))
    assert [len(record.tokens) for record in records] == [place + 1] * 3


def test_without_a_proposal_a_step_is_one_token() -> None:
    model = ToyAdapter()
    records, _ = run(model, Autoregressive(), max_nodes=0)
    assert [(len(r.tokens), r.nodes) for r in records] == [(1, 0)] * 12
    assert [plan.rows for (plan,) in model.forwards] == [5] + [1] * 11


def test_the_time_in_the_model_is_counted_step_by_step() -> None:
    model = ToyAdapter()
    runner = LocalRunner(model, prefill_chunk=2)
    records, _ = run(model, oracle(model), runner=runner)
    assert all(record.forward_seconds > 0 for record in records)
    assert sum(r.forward_seconds for r in records) == pytest.approx(runner.forward_seconds)
    runner.start(capacity=1)
    assert runner.forward_seconds == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_cache_holds_the_text_and_nothing_else(make: Make, params: SamplingParams) -> None:
    model = ToyAdapter()
    records, _ = run(model, make(model, params), params=params)
    text = tuple(PROMPT + emitted(records))
    (cache,) = model.caches
    rows = cache.rows[0]
    # The last token is in the cache if it was accepted as a node, not if it is a bonus.
    assert len(rows) in {len(text) - 1, len(text)}
    assert rows == [text[: end + 1] for end in range(len(rows))]


def test_what_a_proposer_is_told() -> None:
    model = ToyAdapter()
    proposer = RandomProposer(seed=4, vocab_size=11, nodes=9, text=oracle(model).text)
    records, _ = run(model, proposer)
    assert len(proposer.budgets) == len(records)
    # The step that ends the text is not told: nobody asks again.
    assert len(proposer.outcomes) == len(records) - 1
    done = len(PROMPT)
    for outcome, record, budget in zip(proposer.outcomes, records, proposer.budgets, strict=False):
        tree = outcome.proposal.tree
        assert outcome.plan.tree is tree
        assert outcome.tokens == record.tokens
        assert outcome.tokens[:-1] == tuple(tree.tokens[node] for node in outcome.accepted)
        assert outcome.accepted == tree.path((ROOT, *outcome.accepted)[-1])
        assert outcome.target.after((ROOT, *outcome.accepted)[-1]) == outcome.tokens[-1]
        assert budget.tokens == 12 - (done - len(PROMPT))
        done += len(record.tokens)
    assert any(outcome.accepted for outcome in proposer.outcomes)


def test_budgets_shrink_at_the_end_of_the_text_and_of_the_context() -> None:
    model = ToyAdapter(max_positions=len(PROMPT) + 7)
    proposer = RandomProposer(seed=4, vocab_size=11, nodes=0)
    run(model, proposer, max_new_tokens=5, max_nodes=4)
    assert proposer.budgets == [
        Budget(nodes=4, depth=7, tokens=5),
        Budget(nodes=4, depth=6, tokens=4),
        Budget(nodes=4, depth=5, tokens=3),
        Budget(nodes=4, depth=4, tokens=2),
        Budget(nodes=4, depth=3, tokens=1),
    ]
    assert [budget.useful_depth for budget in proposer.budgets] == [4, 3, 2, 1, 0]
    assert Budget(nodes=9, depth=2, tokens=9).useful_depth == 2


def test_requests_do_not_influence_each_other(make: Make) -> None:
    model = ToyAdapter()
    runner = LocalRunner(model)
    first, _ = run(model, make(model, GREEDY), runner=runner)
    other = RandomProposer(seed=5, vocab_size=11, nodes=9)
    run(model, other, prompt=[7, 7, 7, 7, 7, 7, 7], max_new_tokens=20, runner=runner)
    again, _ = run(model, make(model, GREEDY), runner=runner)
    assert [(r.tokens, r.nodes) for r in again] == [(r.tokens, r.nodes) for r in first]
    assert len(model.caches) == 2  # the second request needed more memory, the third did not


def test_a_loop_that_is_left_and_taken_up_by_another_request() -> None:
    model = ToyAdapter()
    runner = LocalRunner(model)
    options = {
        "runner": runner,
        "verifier": ExactMatchVerifier(),
        "sampler": make_sampler(GREEDY),
        "max_nodes": 16,
    }
    left = decode_one(PROMPT, proposer=oracle(model), rules=StopRules(max_new_tokens=12), **options)
    next(left)
    left.close()  # type: ignore[attr-defined]
    records, _ = run(model, oracle(model), runner=runner)
    assert emitted(records) == truth(model)


# --- mistakes ------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(
        GenerationError, match="the prompt is empty; give at least one token"
    ) as caught:
        run(ToyAdapter(), Autoregressive(), prompt=[])
    assert caught.value.step is None


class Overeager(OracleProposer):
    """Keeps to its budget for one step."""

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        proposal = super().propose(committed, budget)
        if len(self.budgets) < 2:
            return proposal
        return Proposal(TokenTree((0,) * (budget.nodes + 1), (ROOT,) * (budget.nodes + 1)))


class Digger(OracleProposer):
    """Goes deeper than the model has positions, with few nodes."""

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        proposal = super().propose(committed, budget)
        if len(self.budgets) < 2:
            return proposal
        return Proposal(TokenTree.chain([0] * (budget.depth + 1)))


class Roomy(ToyAdapter):
    """Gives more memory than is asked for, so that the last position is what limits a tree."""

    def new_cache(self, *, batch: int, capacity: int) -> ToyCache:
        return super().new_cache(batch=batch, capacity=capacity + 64)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Overeager,
            "Overeager proposed 7 nodes down to depth 1; its budget is 6 nodes and depth 3",
        ),
        (Digger, "Digger proposed 4 nodes down to depth 4; its budget is 6 nodes and depth 3"),
    ],
)
def test_a_proposal_beyond_its_budget_names_the_proposer_and_the_step(
    kind: type[OracleProposer], message: str
) -> None:
    model = Roomy(max_positions=len(PROMPT) + 8)
    text = oracle(model).text
    with pytest.raises(TreeError) as caught:
        run(model, kind(text, depth=DEPTH), max_nodes=6)
    assert str(caught.value) == f"step 1: {message} (use TokenTree.limited to keep to it)"
    assert caught.value.step == 1


def test_a_proposal_that_is_as_large_as_its_budget_is_run() -> None:
    class Full(RandomProposer):
        def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
            size = budget.nodes
            chain = TokenTree.chain([0] * min(size, budget.depth))
            rest = TokenTree((1,) * (size - len(chain)), (ROOT,) * (size - len(chain)))
            return Proposal(TokenTree.merge([chain, rest], dedupe=False)[0])

    model = ToyAdapter(max_positions=len(PROMPT) + 9)
    records, rules = run(model, Full(seed=0, vocab_size=11, nodes=0), max_nodes=12)
    assert emitted(records) == truth(model)
    assert rules.finish_reason == "capacity"
    assert model.caches[0].capacity == len(PROMPT) + 9 + 12


class Fading(ToyAdapter):
    """Its logits become NaN from one length of the text on."""

    def logits_after(self, path: Sequence[int]) -> Tensor:
        logits = super().logits_after(path)
        return torch.full_like(logits, torch.nan) if len(path) >= 8 else logits


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_broken_logits_are_an_error_that_says_the_step(params: SamplingParams) -> None:
    records = decode_one(
        PROMPT,
        runner=LocalRunner(Fading()),
        proposer=Autoregressive(),
        verifier=ExactMatchVerifier(),
        sampler=make_sampler(params),
        rules=StopRules(max_new_tokens=9),
        max_nodes=0,
    )
    for _ in range(3):
        assert len(next(records).tokens) == 1
    with pytest.raises(GenerationError, match="NaN") as caught:
        next(records)
    assert caught.value.step == 3


class Late(Autoregressive):
    """Fails while it observes its third step."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.steps = 0
        self.error = error

    def observe(self, outcome: StepOutcome) -> None:
        self.steps += 1
        if self.steps == 3:
            raise self.error


def test_an_error_while_a_proposer_observes_says_the_step_too() -> None:
    with pytest.raises(GenerationError) as caught:
        run(ToyAdapter(), Late(GenerationError("broken")))
    assert caught.value.step == 2


def test_an_error_of_a_proposer_itself_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ToyAdapter(), Late(ZeroDivisionError()))
