"""Verification by rejection: its law, exactly, by following every way through a verification.

The exact tests run the verifier itself on fractions. Its random numbers are only known by what
they are compared with, and every comparison is followed both ways, so probabilities are sums and no
sample is taken. The chi-squared tests have fixed seeds and fail by chance for one seed in a
million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit import Decoder
from decodekit.decoder.build import build_strategy
from decodekit.engine import rejection
from decodekit.engine.noise import DRAFT, uniform
from decodekit.engine.rejection import RejectionVerifier, accept_probability, draw, residual
from decodekit.errors import GenerationError
from decodekit.interfaces import Accepted, Budget, Proposal, StepOutcome, TargetTokens, Verifier
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import ROOT, TokenTree
from tests.support.fakes import Acceptance, RandomProposer, ToyAdapter, plain_decode, walked

Path = tuple[int, ...]
Law = Callable[[Path], Sequence[Fraction]]
"""The exact distribution [V] of the token after a path."""

CHI2_1E6 = {15: 56.49}  # the upper 1e-6 quantile, by degrees of freedom


def parts(*weights: int) -> list[Fraction]:
    """Return the distribution [V] with these weights."""
    return [Fraction(weight, sum(weights)) for weight in weights]


def array(values: Sequence[Fraction]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=object)


# --- following every way -------------------------------------------------------------------------


class Walk:
    """One way through all comparisons, and its probability."""

    def __init__(self, decisions: list[bool]) -> None:
        self.chance = Fraction(1)
        self._decisions = decisions
        self._taken = 0

    def choose(self, share: Fraction) -> bool:
        """Return what is decided here; yes has the probability ``share``."""
        if self._taken == len(self._decisions):
            self._decisions.append(True)
        yes = self._decisions[self._taken]
        self._taken += 1
        self.chance *= share if yes else 1 - share
        return yes


def every_walk(verify: Callable[[Walk], Acceptance]) -> Iterator[tuple[Acceptance, Fraction]]:
    """Yield what comes of every way through ``verify``, and the probability of that way."""
    decisions: list[bool] = []
    while True:
        walk = Walk(decisions)
        yield verify(walk), walk.chance
        while decisions and not decisions[-1]:
            decisions.pop()
        if not decisions:
            return
        decisions[-1] = False


class Uniform:
    """A number in [0, 1) that is known to lie between two fractions, and no better."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._low, self._high = Fraction(0), Fraction(1)

    def __lt__(self, bound: Any) -> bool:
        if bound is self:  # numpy's check for a NaN
            return False
        if bound <= self._low or bound >= self._high:
            return bool(bound >= self._high)
        below = self._walk.choose((bound - self._low) / (self._high - self._low))
        if below:
            self._high = bound
        else:
            self._low = bound
        return below

    def __gt__(self, bound: Any) -> bool:
        return not self < bound  # equal with probability 0

    def __mul__(self, factor: Any) -> Uniform:
        assert factor == 1, "what is left of p sums to 1"
        return self


class Row:
    """A row [V] of fractions that can be taken for a tensor."""

    def __init__(self, values: Sequence[Fraction]) -> None:
        self.values = values

    def double(self) -> Row:
        return self

    def cpu(self) -> Row:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return array(self.values)


class ExactTarget:
    """A target with exact distributions; its random numbers take every value."""

    def __init__(self, tree: TokenTree, law: Law, walk: Walk) -> None:
        self._tree = tree
        self._law = law
        self._walk = walk
        # One number for each position and draw, as the interface says, whoever asks and how often.
        self._numbers: dict[tuple[int, int], Uniform] = {}

    def probabilities(self, node: int) -> Row:
        return Row(self._law(self._tree.path_tokens(node)))

    def uniform(self, node: int, draw: int) -> Uniform:
        depth = len(self._tree.path(node))
        return self._numbers.setdefault((depth, draw), Uniform(self._walk))


@dataclass(frozen=True)
class Draft:
    """One proposal among all that could be drawn, and the probability that it is.

    Attributes:
        rows: What each token was drawn from; None for guesses that are certain.
    """

    tree: TokenTree
    rows: list[Sequence[Fraction]] | None = None
    chance: Fraction = Fraction(1)


def siblings(
    q: Sequence[Fraction], count: int, *, replace: bool
) -> Iterator[tuple[list[int], list[Sequence[Fraction]], Fraction]]:
    """Yield all ways to draw up to ``count`` tokens from q: the tokens, their rows, the chance."""
    if count == 0 or sum(q) == 0:
        yield [], [], Fraction(1)
        return
    for token, chance in enumerate(q):
        if chance == 0:
            continue
        rest = list(q)
        if not replace:
            rest[token] = Fraction(0)
            left = sum(rest)
            rest = [value / left for value in rest] if left else rest
        for tokens, rows, others in siblings(rest, count - 1, replace=replace):
            yield [token, *tokens], [q, *rows], chance * others


def drafts(q: Law, shape: Sequence[int], *, replace: bool) -> Iterator[Draft]:
    """Yield every tree with ``shape[level]`` children below each node, drawn from q."""

    def grow(nodes: list[tuple[int, Path, int]], done: Draft) -> Iterator[Draft]:
        """Go on below ``nodes``: the node, its path and its level."""
        if not nodes:
            yield done
            return
        (node, path, level), *others = nodes
        if level == len(shape):
            yield from grow(others, done)
            return
        for tokens, rows, chance in siblings(q(path), shape[level], replace=replace):
            size = len(done.tree)
            tree = TokenTree(
                (*done.tree.tokens, *tokens), (*done.tree.parents, *(node for _ in tokens))
            )
            below = [(size + i, (*path, token), level + 1) for i, token in enumerate(tokens)]
            grown = Draft(tree, [*(done.rows or ()), *rows], done.chance * chance)
            yield from grow(others + below, grown)

    yield from grow([(ROOT, (), 0)], Draft(TokenTree(), []))


def first_tokens(
    law: Law, proposals: Iterator[Draft] | Sequence[Draft], length: int = 1
) -> dict[Path, Fraction]:
    """Return the exact distribution of the first tokens of a text.

    A run that is shorter is continued by the model, as further steps would do.
    """
    chances: dict[Path, Fraction] = {}

    def add(run: Path, chance: Fraction) -> None:
        if len(run) >= length:
            chances[run[:length]] = chances.get(run[:length], Fraction(0)) + chance
            return
        for token, p in enumerate(law(run)):
            if p:
                add((*run, token), chance * p)

    drawn = Fraction(0)
    for draft in proposals:
        rows = None if draft.rows is None else [Row(row) for row in draft.rows]
        proposal = Proposal(draft.tree, rows)  # type: ignore[arg-type]

        def verify(walk: Walk, proposal: Proposal = proposal) -> Acceptance:
            target: Any = ExactTarget(proposal.tree, law, walk)
            return walked(RejectionVerifier(), proposal, target)

        ways = Fraction(0)
        for acceptance, chance in every_walk(verify):
            assert acceptance.tokens[:-1] == tuple(draft.tree.tokens[n] for n in acceptance.path)
            add(acceptance.tokens, draft.chance * chance)
            ways += chance
        assert ways == 1
        drawn += draft.chance
    assert drawn == 1
    return chances


def texts_of(law: Law, length: int = 1) -> dict[Path, Fraction]:
    """Return the model's own distribution of the first tokens, without what is impossible."""
    chances: dict[Path, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        chances = {
            (*path, token): chance * p
            for path, chance in chances.items()
            for token, p in enumerate(law(path))
            if p
        }
    return chances


def always(p: Sequence[Fraction]) -> Law:
    return lambda _path: p


# --- the law of one token ------------------------------------------------------------------------

PAIRS = {
    "different": (parts(1, 2, 3), parts(3, 1, 2)),
    "equal": (parts(1, 2, 3), parts(1, 2, 3)),
    "nothing in common": (parts(1, 2, 0, 0), parts(0, 0, 1, 1)),
    "p is zero where q is not": (parts(1, 0, 4), parts(2, 3, 2)),
    "q is zero where p is not": (parts(1, 2, 4), parts(3, 0, 1)),
    "p is certain": (parts(0, 1, 0), parts(1, 1, 1)),
    "q is certain": (parts(2, 1, 1), parts(1, 0, 0)),
    "q is certain of what p rules out": (parts(0, 1, 1), parts(1, 0, 0)),
    "two tokens": (parts(1, 6), parts(5, 2)),
    "four tokens": (parts(1, 1, 5, 2), parts(4, 3, 1, 1)),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[list[Fraction], list[Fraction]]:
    return PAIRS[request.param]


def test_it_is_a_verifier() -> None:
    assert isinstance(RejectionVerifier(), Verifier)


def test_without_a_draft_the_token_has_the_targets_distribution(pair: Any) -> None:
    law = always(pair[0])
    assert first_tokens(law, [Draft(TokenTree())]) == texts_of(law)


@pytest.mark.parametrize("replace", [True, False], ids=["independent", "without replacement"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_drawn_drafts_leave_the_targets_distribution(pair: Any, count: int, replace: bool) -> None:
    p, q = pair
    proposals = drafts(always(q), [count], replace=replace)
    assert first_tokens(always(p), proposals) == texts_of(always(p))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_certain_drafts_leave_the_targets_distribution(pair: Any, count: int) -> None:
    """All runs of siblings, the same token several times over among them."""
    p, _ = pair
    for tokens in product(range(len(p)), repeat=count):
        draft = Draft(TokenTree(tokens, (ROOT,) * count))
        assert first_tokens(always(p), [draft]) == texts_of(always(p))


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(2, 4), count=st.integers(1, 3), replace=st.booleans())
def test_any_two_distributions(data: st.DataObject, size: int, count: int, replace: bool) -> None:
    weights = st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any)
    p, q = parts(*data.draw(weights)), parts(*data.draw(weights))
    proposals = drafts(always(q), [count], replace=replace)
    assert first_tokens(always(p), proposals) == texts_of(always(p))


def test_drafts_from_different_distributions_one_after_the_other() -> None:
    p, first, second = parts(3, 1, 2), parts(1, 1, 4), parts(0, 2, 1)
    proposals = [
        Draft(TokenTree((a, b), (ROOT, ROOT)), [first, second], first[a] * second[b])
        for a, b in product(range(3), repeat=2)
        if first[a] * second[b]
    ]
    assert first_tokens(always(p), proposals) == texts_of(always(p))


def test_a_drawn_and_a_certain_draft_side_by_side() -> None:
    """A certain one among drawn ones has all of its row on its token."""
    p, q = parts(3, 1, 2), parts(1, 1, 4)
    for certain in range(3):
        row = [Fraction(int(token == certain)) for token in range(3)]
        for first, second in (((row, certain), None), (None, (row, certain))):
            proposals = []
            for drawn in range(3):
                pairs = [first or (q, drawn), second or (q, drawn)]
                tree = TokenTree(tuple(token for _, token in pairs), (ROOT, ROOT))
                proposals.append(Draft(tree, [rows for rows, _ in pairs], q[drawn]))
            assert first_tokens(always(p), proposals) == texts_of(always(p))


# --- the law of a tree ---------------------------------------------------------------------------

THREE: Mapping[Path, list[Fraction]] = {
    (): parts(4, 3, 1),
    (0,): parts(1, 2, 5),
    (1,): parts(0, 1, 0),
    (2,): parts(3, 3, 2),
    (0, 1): parts(2, 2, 4),
    (1, 1): parts(6, 1, 1),
    (2, 0): parts(0, 1, 7),
}
DRAFT_OF_THREE: Mapping[Path, list[Fraction]] = {
    (): parts(1, 3, 3),
    (0,): parts(2, 1, 0),
    (1,): parts(1, 1, 1),
    (2,): parts(0, 0, 1),
}
TWO: Mapping[Path, list[Fraction]] = {
    (): parts(2, 3),
    (0,): parts(5, 1),
    (1,): parts(1, 7),
    (0, 0): parts(1, 1),
}
DRAFT_OF_TWO: Mapping[Path, list[Fraction]] = {(): parts(3, 1), (0,): parts(1, 2)}


def of(table: Mapping[Path, list[Fraction]], default: list[Fraction]) -> Law:
    return lambda path: table.get(path, default)


MODEL, DRAFTER = of(THREE, parts(3, 0, 5)), of(DRAFT_OF_THREE, parts(1, 4, 1))
COIN, DRAFT_COIN = of(TWO, parts(3, 5)), of(DRAFT_OF_TWO, parts(1, 1))


@pytest.mark.parametrize("replace", [True, False], ids=["independent", "without replacement"])
@pytest.mark.parametrize(
    ("model", "drafter", "shape"),
    [
        (MODEL, DRAFTER, [1, 1]),
        (MODEL, DRAFTER, [2, 1]),
        (MODEL, DRAFTER, [1, 2]),
        (COIN, DRAFT_COIN, [2, 2]),
        (COIN, DRAFT_COIN, [3, 1]),
        (COIN, DRAFT_COIN, [1, 1, 1]),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, list) else "",
)
def test_the_tokens_of_a_whole_tree_have_the_models_law(
    model: Law, drafter: Law, shape: list[int], replace: bool
) -> None:
    """All trees of two levels or three, all ways through them, and one token after them."""
    length = len(shape) + 1
    proposals = drafts(drafter, shape, replace=replace)
    assert first_tokens(model, proposals, length) == texts_of(model, length)


@pytest.mark.parametrize(
    "tree",
    [
        TokenTree.chain([0, 1]),
        TokenTree.chain([1, 0]),  # its second token is impossible after its first
        TokenTree((0, 1, 2), (ROOT, ROOT, ROOT)),  # everything: always accepted
        TokenTree((0, 2, 1, 2), (ROOT, ROOT, 0, 0)),
        TokenTree((0, 0, 1, 2, 2), (ROOT, ROOT, 0, 1, 1)),  # one path, guessed twice over
        TokenTree((2, 0, 0, 0, 2), (ROOT, 0, ROOT, ROOT, 3)),
    ],
    ids=lambda tree: f"{tree.tokens}-{tree.parents}",
)
def test_the_tokens_of_a_certain_tree_have_the_models_law(tree: TokenTree) -> None:
    assert first_tokens(MODEL, [Draft(tree)], 3) == texts_of(MODEL, 3)


def test_the_exact_check_finds_a_wrong_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these is a mistake that was made somewhere; the check must tell."""
    right = (accept_probability, residual)

    def check() -> bool:
        return all(
            first_tokens(MODEL, drafts(DRAFTER, [2, 1], replace=replace), 2) == texts_of(MODEL, 2)
            for replace in (True, False)
        )

    wrong: list[dict[str, Any]] = [
        {"accept_probability": lambda *_: Fraction(1)},
        {"accept_probability": lambda p, _, token: right[0](p, None, token)},
        {"residual": lambda p, *_: p},
        {"residual": lambda p, _, token: right[1](p, None, token)},
    ]
    assert check()
    for functions in wrong:
        with monkeypatch.context() as patch:
            for name, function in functions.items():
                patch.setattr(rejection, name, function)
            assert not check(), functions


# --- the functions -------------------------------------------------------------------------------


def test_how_probable_acceptance_is() -> None:
    p, q = array(parts(1, 2, 3)), array(parts(3, 2, 1))
    assert [accept_probability(p, q, token) for token in range(3)] == [Fraction(1, 3), 1, 1]
    assert [accept_probability(p, None, token) for token in range(3)] == parts(1, 2, 3)


def test_what_is_left_after_a_rejection() -> None:
    p, q = array(parts(1, 2, 3)), array(parts(3, 2, 1))
    assert residual(p, q, 0).tolist() == parts(0, 0, 1)
    assert residual(array(parts(2, 3, 1)), array(parts(1, 1, 4)), 2).tolist() == parts(1, 2, 0)
    assert residual(p, None, 1).tolist() == parts(1, 0, 3)
    assert p.tolist() == parts(1, 2, 3)
    assert q.tolist() == parts(3, 2, 1)


@pytest.mark.parametrize("q", [parts(1, 3, 2), parts(2, 1, 0)])
def test_where_nothing_is_left_p_itself_is_returned(q: list[Fraction]) -> None:
    assert residual(array(q), array(q), 0).tolist() == q
    certain = array(parts(0, 1, 0))
    assert residual(certain, None, 1).tolist() == certain.tolist()


@pytest.mark.parametrize("p", [parts(1, 2, 3), parts(0, 3, 0, 0, 1, 0), parts(0, 0, 1), parts(5)])
def test_a_draw_is_the_inverse_of_the_cumulative_sum(p: list[Fraction]) -> None:
    cells = 24
    for shift in (Fraction(0), Fraction(1, 2), Fraction(99, 100)):
        drawn = [draw(array(p), (cell + shift) / cells) for cell in range(cells)]
        assert [Fraction(drawn.count(token), cells) for token in range(len(p))] == p
        assert drawn == sorted(drawn)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_a_draw_never_gives_a_token_of_probability_zero(number: float) -> None:
    for size in (1, 2, 7, 1000):
        for ends in (0, 1, 3):
            p = np.concatenate([np.zeros(ends), np.full(size, 1 / size), np.zeros(ends)])
            assert p[draw(p, number)] > 0
    # Even where the weights do not sum to 1, or a product is rounded up to the sum.
    assert draw(np.array([0.0, 5e-324, 0.0]), number) == 1
    assert draw(np.array([0.0, 7.0, 0.0]), number) == 1


@pytest.mark.parametrize("q", [[0.0, 0.5, 0.5], [np.nan, 0.5, 0.5]])
def test_a_draft_that_cannot_have_been_drawn_is_an_error(q: list[float]) -> None:
    with pytest.raises(GenerationError) as caught:
        accept_probability(np.array([0.5, 0.5, 0.0]), np.array(q), 0)
    assert str(caught.value) == "draft_probs give token 0 probability 0, yet it was proposed"


# --- in floating point ---------------------------------------------------------------------------


class Floats:
    """A target with one distribution everywhere and one random number."""

    def __init__(self, p: Tensor, number: float) -> None:
        self._p = p
        self._number = number

    def probabilities(self, node: int) -> Tensor:
        return self._p.clone()

    def uniform(self, node: int, draw: int) -> float:
        return self._number


def verify(
    tree: TokenTree, p: Sequence[float], number: float, q: Tensor | None = None
) -> tuple[int, ...]:
    target: Any = Floats(torch.tensor(p), number)
    return walked(RejectionVerifier(), Proposal(tree, q), target).tokens


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("q", [None, [[0.25] * 4], [[0.9, 0.1 / 3, 0.1 / 3, 0.1 / 3]]], ids=str)
@pytest.mark.parametrize("p", [[0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.5]], ids=str)
def test_a_token_of_probability_zero_is_never_emitted(
    p: list[float], q: list[list[float]] | None, number: float
) -> None:
    """transformers#32867: a random number of exactly 0 accepted any draft."""
    for tokens in product(range(4), repeat=3):
        for tree in (TokenTree(tokens, (ROOT,) * 3), TokenTree.chain(tokens)):
            run = verify(tree, p, number, None if q is None else torch.tensor(q * 3))
            assert all(p[token] > 0 for token in run)


@pytest.mark.parametrize("size", [3, 7, 10, 49, 1000])
def test_every_token_drafted_and_the_largest_number_of_all(size: int) -> None:
    """Rounding may leave a draft rejected that exact numbers would accept."""
    p = torch.rand(size, generator=torch.Generator().manual_seed(size)).softmax(dim=0)
    bush = TokenTree(tuple(range(size)), (ROOT,) * size)
    for q in (None, p.expand(size, -1), torch.full((size, size), 1 / size)):
        run = verify(bush, p.tolist(), 1 - 2.0**-53, q)
        assert 1 <= len(run) <= 2
        assert all(0 <= token < size for token in run)


@pytest.mark.parametrize("row", [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [-1.0, 1.0, 1.0]], ids=str)
def test_draft_probabilities_that_deny_their_token(row: list[float]) -> None:
    with pytest.raises(GenerationError, match="draft_probs give token 0 probability 0"):
        verify(TokenTree.chain([0]), [0.5, 0.25, 0.25], 0.999, torch.tensor([row]))


def test_a_wrong_node_that_is_not_reached_does_no_harm() -> None:
    tree = TokenTree((0, 1), (ROOT, 0))
    q = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert verify(tree, [0.0, 1.0], 0.5, q) == (1,)


def test_nothing_is_asked_about_what_comes_after_the_token_that_is_taken() -> None:
    """A text may end with any token, and what follows it may be no text at all."""

    class Watched(Floats):
        asked: ClassVar[list[int]] = []

        def probabilities(self, node: int) -> Tensor:
            self.asked.append(node)
            return self._p

    target: Any = Watched(torch.tensor([1.0, 0.0]), 0.5)
    run = RejectionVerifier().verify(Proposal(TokenTree.chain([0, 0, 1])), target)
    for count in (1, 2):
        assert next(run) == Accepted(0, count - 1)
        assert target.asked == [ROOT, 0, 1][:count]
    assert [*run] == [Accepted(0, None)]
    assert target.asked == [ROOT, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_proposal_and_the_targets_rows_are_left_as_they_were(dtype: torch.dtype) -> None:
    """A proposer may use its rows again, for other nodes or in the next step."""
    q = torch.tensor([[0.5, 0.3, 0.1], [0.5, 0.3, 0.1]], dtype=dtype)  # rounded: about 1 is allowed
    p = torch.tensor([0.1, 0.2, 0.6], dtype=dtype)
    before = (q.clone(), p.clone())

    class Target(Floats):
        def probabilities(self, node: int) -> Tensor:
            return self._p

    target: Any = Target(p, 0.9)
    walked(RejectionVerifier(), Proposal(TokenTree((0, 1), (ROOT, ROOT)), q), target)
    assert torch.equal(q, before[0])
    assert torch.equal(p, before[1])


# --- through the decode loop ---------------------------------------------------------------------

PROMPT = [3, 1, 2]


class Cached(ToyAdapter):
    """Thinks about each path once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known = lru_cache(maxsize=None)(super().logits_after)

    def logits_after(self, path: Sequence[int]) -> Tensor:
        return self._known(tuple(path))


def softmax(logits: Tensor, temperature: float) -> list[float]:
    weights: list[float] = (logits.double() / temperature).softmax(dim=-1).tolist()
    return weights


class Drafted:
    """A strategy that draws trees from another model, without replacement."""

    def __init__(self, model: ToyAdapter, shape: Sequence[int]) -> None:
        self.model = model
        self.shape = shape
        self.max_nodes = 16

    def new_proposer(self, params: SamplingParams) -> DraftProposer:
        return DraftProposer(self, params.seed)


class DraftProposer:
    def __init__(self, strategy: Drafted, seed: int) -> None:
        self._strategy = strategy
        self._seed = seed

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        model, shape = self._strategy.model, self._strategy.shape
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[list[float]] = []
        level: list[tuple[int, Path]] = [(ROOT, ())]
        for depth, count in enumerate(shape[: budget.depth]):
            below = []
            for node, path in level:
                q = softmax(model.logits_after((*committed, *path)), 1.0)
                for _ in range(count):
                    # A number of its own for every node.
                    place = len(committed) + depth
                    number = uniform(self._seed, place, purpose=DRAFT, draw=len(tokens))
                    token = int((np.cumsum(q) <= number).sum())
                    token = min(token, int(np.flatnonzero(q)[-1]))
                    below.append((len(tokens), (*path, token)))
                    tokens.append(token)
                    parents.append(node)
                    rows.append(q)
                    q = [0.0 if other == token else value for other, value in enumerate(q)]
                    q = [value / sum(q) for value in q]
            level = below
        tree = TokenTree(tuple(tokens), tuple(parents))
        probs = torch.tensor(rows, dtype=torch.float32).reshape(len(tree), model.vocab_size)
        return Proposal(tree, probs)

    def observe(self, outcome: StepOutcome) -> None:
        pass


def statistic(strategy: Any, verifier: Verifier, *, samples: int, temperature: float) -> float:
    """Return how far the first two tokens of many texts are from the model's law, as chi-squared.

    Every text has another seed; below ``CHI2_1E6[15]`` for all but one set of seeds in a million.
    """
    model = Cached(4)
    decoder = Decoder(model, strategy=strategy, verifier=verifier)
    counts = dict.fromkeys(product(range(4), repeat=2), 0)
    for seed in range(samples):
        result = decoder.generate(PROMPT, max_new_tokens=2, temperature=temperature, seed=seed)
        counts[result.tokens[0], result.tokens[1]] += 1
    total = 0.0
    for (first, second), count in counts.items():
        p = softmax(model.logits_after(PROMPT), temperature)[first]
        p *= softmax(model.logits_after([*PROMPT, first]), temperature)[second]
        assert samples * p > 5, "too few samples for chi-squared"
        total += (count - samples * p) ** 2 / (samples * p)
    return total


@pytest.mark.parametrize("shape", [[1], [1, 1], [2], [2, 1]], ids=str)
def test_drawn_drafts_leave_the_law_of_the_text(shape: list[int]) -> None:
    strategy = Drafted(Cached(4, seed=9), shape)
    value = statistic(strategy, RejectionVerifier(), samples=1500, temperature=2.0)
    assert value < CHI2_1E6[15]


@pytest.mark.parametrize("name", ["autoregressive", "jacobi", "prompt_lookup", "lookahead"])
def test_certain_drafts_leave_the_law_of_the_text(name: str) -> None:
    strategy = build_strategy(name)
    value = statistic(strategy, RejectionVerifier(), samples=1500, temperature=2.0)
    assert value < CHI2_1E6[15]


class AlwaysAccept(RejectionVerifier):
    """Takes the first draft for the model's word (transformers#28508)."""

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        tree = proposal.tree
        reached = ROOT
        while reached in tree.children:
            reached = tree.children[reached][0]
            yield Accepted(tree.tokens[reached], reached)
        p = target.probabilities(reached).double().numpy()
        yield Accepted(draw(p, target.uniform(reached, 0)), None)


def test_the_check_of_the_law_finds_drafts_that_are_always_accepted() -> None:
    strategy = Drafted(Cached(4, seed=9), [1])
    value = statistic(strategy, AlwaysAccept(), samples=1500, temperature=2.0)
    assert value > 10 * CHI2_1E6[15]


def test_the_check_of_the_law_finds_a_draw_from_the_whole_of_p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, *_: p)
    strategy = Drafted(Cached(4, seed=9), [2, 1])
    value = statistic(strategy, RejectionVerifier(), samples=1500, temperature=2.0)
    assert value > CHI2_1E6[15]


def test_a_good_drafter_saves_steps() -> None:
    """Drafts from the model itself are always accepted, those of another model now and then."""
    model = Cached(6)
    options = {"max_new_tokens": 60, "temperature": 1.0}
    perfect = Decoder(model, strategy=Drafted(model, [1] * 4), verifier=RejectionVerifier())
    assert perfect.generate(PROMPT, **options).stats.steps == 12
    other = Decoder(
        model, strategy=Drafted(Cached(6, seed=1), [1] * 4), verifier=RejectionVerifier()
    )
    assert 12 < other.generate(PROMPT, **options).stats.steps < 60


def test_a_seed_is_a_text_and_another_seed_another() -> None:
    decoder = Decoder(
        Cached(6), strategy=Drafted(Cached(6, seed=1), [2, 1]), verifier=RejectionVerifier()
    )
    texts = [
        decoder.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=seed).tokens
        for seed in (0, 1, 0, 2)
    ]
    assert texts[0] == texts[2]
    assert all(a != b for a, b in pairwise(texts))


def test_a_draw_of_zero_never_emits_an_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole loop: the filters leave two tokens, and every number is 0."""
    monkeypatch.setattr("decodekit.engine.target.uniform", lambda *_, **__: 0.0)
    model = Cached(6)
    for strategy in (build_strategy("lookahead"), Drafted(Cached(6, seed=1), [2, 1])):
        decoder = Decoder(model, strategy=strategy, verifier=RejectionVerifier())
        tokens = decoder.generate(PROMPT, max_new_tokens=12, temperature=1.0, top_k=2).tokens
        for place, token in enumerate(tokens):
            best = model.logits_after([*PROMPT, *tokens[:place]]).topk(2).indices.tolist()
            assert token in best


# --- greedy --------------------------------------------------------------------------------------


class RandomGuesses:
    """Random trees, with or without made-up probabilities of the drafts."""

    max_nodes = 16

    def __init__(self, seed: int, *, drawn: bool, text: Sequence[int] | None) -> None:
        self._seed = seed
        self._drawn = drawn
        self._text = text

    def new_proposer(self, params: SamplingParams) -> RandomGuesses:
        self._inner = RandomProposer(seed=self._seed, vocab_size=6, nodes=9, text=self._text)
        self._generator = torch.Generator().manual_seed(self._seed)
        return self

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        tree = self._inner.propose(committed, budget).tree
        if not self._drawn:
            return Proposal(tree)
        rows = torch.rand((len(tree), 6), generator=self._generator)
        rows[range(len(tree)), list(tree.tokens)] += 1e-3
        return Proposal(tree, rows / rows.sum(dim=-1, keepdim=True))

    def observe(self, outcome: StepOutcome) -> None:
        self._inner.observe(outcome)


@pytest.mark.parametrize("drawn", [False, True], ids=["certain", "drawn"])
@pytest.mark.parametrize("context", [None, 1])
@pytest.mark.parametrize("seed", range(8))
def test_greedy_text_is_the_argmax_whatever_the_drafts(
    seed: int, context: int | None, drawn: bool
) -> None:
    model = ToyAdapter(6, seed, context=context)
    expected = plain_decode(model, PROMPT, max_new_tokens=40)
    strategy = RandomGuesses(seed, drawn=drawn, text=PROMPT + expected)
    decoder = Decoder(model, strategy=strategy, verifier=RejectionVerifier())
    result = decoder.generate(PROMPT, max_new_tokens=30)
    assert result.tokens == expected[:30]
    assert result.stats.steps < 30


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4, "suppress_tokens": [2]}])
@pytest.mark.parametrize("name", ["autoregressive", "jacobi", "prompt_lookup", "lookahead"])
def test_greedy_text_of_every_strategy_is_that_of_exact_match(
    name: str, options: dict[str, Any]
) -> None:
    model = ToyAdapter(6, context=2)
    one, other = (
        Decoder(model, strategy=build_strategy(name), verifier=verifier).generate(
            PROMPT, max_new_tokens=30, **options
        )
        for verifier in (RejectionVerifier(), None)
    )
    assert one.tokens == other.tokens
    assert one.stats.steps == other.stats.steps
    assert (one.tokens == plain_decode(model, PROMPT, max_new_tokens=30)) == (not options)
