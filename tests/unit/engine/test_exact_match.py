"""What is accepted: walks by hand, and the exact law of acceptance under sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.sampling import GreedySampler
from decodekit.engine.target import StepTarget
from decodekit.errors import GenerationError
from decodekit.interfaces import Proposal, Verifier
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree
from tests.support.fakes import Acceptance, walked


class Script:
    """A target that says, after every path, the next token of one true text."""

    def __init__(self, tree: TokenTree, truth: Sequence[int]) -> None:
        self.tree = tree
        self.truth = list(truth)

    def after(self, node: int) -> int:
        path = list(self.tree.path_tokens(node))
        return self.truth[len(path)] if path == self.truth[: len(path)] else -1

    def after_many(self, nodes: Sequence[int]) -> list[int]:
        return [self.after(node) for node in nodes]


def verify(tree: TokenTree, truth: Sequence[int]) -> Acceptance:
    return walked(ExactMatchVerifier(), Proposal(tree), Script(tree, truth))


# --- walks ---------------------------------------------------------------------------------------


def test_it_is_a_verifier() -> None:
    assert isinstance(ExactMatchVerifier(), Verifier)


def test_nothing_proposed_gives_the_bonus_alone() -> None:
    assert verify(TokenTree(), [4, 5]) == Acceptance(path=(), tokens=(4,))


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_a_full_match_is_accepted_whole_and_then_a_bonus(length: int) -> None:
    truth = list(range(10, 10 + length + 1))
    tree = TokenTree.chain(truth[:length])
    assert verify(tree, truth) == Acceptance(tuple(range(length)), tuple(truth))


@pytest.mark.parametrize("wrong", range(5))
def test_a_chain_is_accepted_up_to_its_first_wrong_token(wrong: int) -> None:
    truth = [1, 2, 3, 4, 5, 6]
    chain = truth[:5]
    chain[wrong] = 9
    expected = Acceptance(tuple(range(wrong)), tuple(truth[: wrong + 1]))
    assert verify(TokenTree.chain(chain), truth) == expected


def test_the_deepest_branch_that_is_right_is_taken() -> None:
    tree, (_, right, _) = TokenTree.merge(
        [TokenTree.chain([1, 9, 9]), TokenTree.chain([1, 2, 3]), TokenTree.chain([1, 2, 8])]
    )
    assert verify(tree, [1, 2, 3, 4]) == Acceptance(right, (1, 2, 3, 4))


def test_a_right_token_below_a_wrong_one_is_not_taken() -> None:
    tree = TokenTree((9, 2, 1), (ROOT, 0, ROOT))
    assert verify(tree, [1, 2]) == Acceptance((2,), (1, 2))


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_duplicates_are_all_followed(order: tuple[int, ...]) -> None:
    """Of equal siblings with different children, the path goes on below the right one."""
    chains = [[1, 9], [1, 2, 3], [1, 2]]
    trees = [TokenTree.chain(chains[index]) for index in order]
    tree, maps = TokenTree.merge(trees, dedupe=False)
    acceptance = verify(tree, [1, 2, 3, 4])
    assert acceptance.tokens == (1, 2, 3, 4)
    assert acceptance.path == maps[order.index(1)]
    assert tree.path_tokens(acceptance.path[-1]) == (1, 2, 3)


# --- choosing on demand --------------------------------------------------------------------------


class Recorder:
    """A sampler that says the row and the position it is asked for, and remembers them."""

    def __init__(self, *, in_bulk: bool = False) -> None:
        self.in_bulk = in_bulk
        self.calls: list[tuple[int, list[int]]] = []

    def choose(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        self.calls.append((len(logits), list(positions)))
        rows = range(len(logits)) if logits.is_meta else map(int, logits[:, 0])
        return [100 * row + position for row, position in zip(rows, positions, strict=True)]


# Pending 7, 7 at positions 4, 5; the anchor is the second; nodes at 6, 6, 7.
PLAN = StepPlan(4, (7, 7), TokenTree((1, 2, 3), (ROOT, ROOT, 1)))
LOGITS = torch.arange(4.0)[:, None]  # entry 0 after the anchor, entry node + 1 after a node


def test_on_a_cpu_only_what_is_needed_is_chosen_and_once() -> None:
    sampler = Recorder()
    target = StepTarget(PLAN, LOGITS, sampler)
    assert target.after(ROOT) == 6  # the token after position 5
    assert target.after(1) == 207
    assert target.after_many([2, 1, 2, ROOT, 0]) == [308, 207, 308, 6, 107]
    assert target.after_many([]) == []
    assert sampler.calls == [(1, [6]), (1, [7]), (2, [8, 7])]


def test_few_rows_are_chosen_in_one_go_where_that_costs_no_more() -> None:
    sampler = Recorder(in_bulk=True)
    target = StepTarget(PLAN, LOGITS, sampler)
    assert target.after(1) == 207
    assert target.after_many([0, ROOT, 2]) == [107, 6, 308]
    assert sampler.calls == [(4, [6, 7, 7, 8])]
    plan = StepPlan(4, (7,), TokenTree.chain(range(20)))
    StepTarget(plan, torch.arange(21.0)[:, None], sampler).after(ROOT)
    assert sampler.calls[1:] == [(1, [5])]


def test_on_a_device_everything_is_chosen_in_one_go() -> None:
    sampler = Recorder()
    target = StepTarget(PLAN, LOGITS.to("meta"), sampler)
    assert target.after(1) == 207
    assert target.after_many([0, ROOT, 2]) == [107, 6, 308]
    assert sampler.calls == [(4, [6, 7, 7, 8])]


def test_broken_logits_of_a_node_that_is_not_reached_do_no_harm() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    target = StepTarget(StepPlan(0, (1,), TokenTree.chain([0])), logits, GreedySampler())
    tree = TokenTree.chain([0])
    assert walked(ExactMatchVerifier(), Proposal(tree), target) == Acceptance((), (1,))


def test_broken_logits_of_the_anchor_are_an_error() -> None:
    logits = torch.full((1, 3), torch.nan)
    target = StepTarget(StepPlan(0, (1,)), logits, GreedySampler())
    with pytest.raises(GenerationError):
        walked(ExactMatchVerifier(), Proposal(), target)


# --- the law of acceptance -----------------------------------------------------------------------

EIGHTHS = {  # the model: eighths of probability of tokens 0, 1, 2 after a path; exact in floats
    (): (4, 3, 1),
    (0,): (1, 2, 5),
    (1,): (0, 8, 0),
    (2,): (3, 3, 2),
    (0, 1): (2, 2, 4),
    (0, 2): (6, 1, 1),
    (2, 0): (0, 1, 7),
}
OTHER = (3, 0, 5)


def probability(path: tuple[int, ...], token: int) -> Fraction:
    return Fraction(EIGHTHS.get(path, OTHER)[token], 8)


def of_path(path: tuple[int, ...]) -> Fraction:
    """Return the probability that the model, token by token, says ``path``."""
    result = Fraction(1)
    for place, token in enumerate(path):
        result *= probability(path[:place], token)
    return result


class OnGrid:
    """A sampler whose draw at a position is one of eight cells of the cumulative distribution."""

    seed = 0
    in_bulk = False
    cells: tuple[int, ...] = ()

    def choose(self, logits: torch.Tensor, positions: Sequence[int]) -> list[int]:
        ends = logits.exp().mul(8).round().cumsum(dim=-1)
        cells = [self.cells[position - 6] for position in positions]  # the anchor is at position 5
        return [int((row <= cell).sum()) for row, cell in zip(ends, cells, strict=True)]

    scores = probabilities = None  # type: ignore[assignment]  # nobody asks


@pytest.mark.parametrize(
    "tree",
    [
        TokenTree(),
        TokenTree.chain([0]),
        TokenTree.chain([1, 0]),  # its second token is impossible after its first
        TokenTree.chain([0, 2]),
        TokenTree((0, 1, 2), (ROOT, ROOT, ROOT)),  # everything: always accepted
        TokenTree((2, 2, 2), (ROOT, ROOT, ROOT)),  # the same guess three times counts once
        TokenTree((0, 2, 1, 2), (ROOT, ROOT, 0, 0)),
        TokenTree((0, 0, 1, 2, 2), (ROOT, ROOT, 0, 1, 1)),  # one path, guessed twice over
        TokenTree((2, 0, 0, 0, 2), (ROOT, 0, ROOT, ROOT, 3)),
    ],
    ids=lambda tree: f"{tree.tokens}-{tree.parents}",
)
def test_acceptance_is_exactly_the_models_probability(tree: TokenTree) -> None:
    """All draws of a grid on which every border of the model lies: probabilities by counting.

    A path is accepted with the probability that the model says it; so a level is reached with the
    sum over *distinct* paths to it, and what is emitted is distributed as without any proposal.
    """
    sampler = OnGrid()
    plan = StepPlan(5, (0,), tree)
    paths = [tree.path_tokens(node) for node in (ROOT, *range(len(tree)))]
    logits = torch.tensor([EIGHTHS.get(path, OTHER) for path in paths]).div(8).log()
    height = max(tree.depths, default=0)
    runs: Counter[tuple[int, ...]] = Counter()
    for cells in product(range(8), repeat=height + 1):
        sampler.cells = cells
        target = StepTarget(plan, logits, sampler)
        acceptance = walked(ExactMatchVerifier(), Proposal(tree), target)
        assert acceptance.tokens[:-1] == tree.path_tokens((ROOT, *acceptance.path)[-1])
        runs[acceptance.tokens] += 1
    chance = {run: Fraction(count, 8 ** (height + 1)) for run, count in runs.items()}
    # Every run has the probability that the model gives it ...
    assert chance == {run: of_path(run) for run in chance}
    assert sum(chance.values()) == 1
    # ... and a level is reached with the sum over distinct paths.
    for level in range(height + 1):
        reached = sum(p for run, p in chance.items() if len(run) > level)
        distinct = {path for path in paths if len(path) == level}
        assert reached == sum(of_path(path) for path in distinct)
