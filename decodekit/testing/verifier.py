"""The laws of a verifier."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from decodekit.engine.sampling import make_sampler
from decodekit.engine.target import StepTarget
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import Proposal
from decodekit.interfaces.tree import ROOT, TokenTree
from decodekit.interfaces.verifier import Accepted, Verifier
from decodekit.testing.laws import law, random_tokens, random_tree
from decodekit.testing.toy import ToyAdapter

__all__ = ["check_verifier"]

_SMALL = 5  # a vocabulary in which random guesses are often right
_DRAWS = 1500
_SIGMAS = 5.0  # of a binomial: one false alarm in about two million cells


def check_verifier(verifier: Verifier, *, seed: int = 0, cases: int = 60) -> None:
    """Check a verifier: the path is in the tree, the tokens are the model's, and it asks lazily.

    A verifier with ``same_tokens = False`` is held to the model's tokens under greedy decoding, and
    to its distribution under sampling: the first token of 1,500 draws, for certain guesses and for
    drafts with probabilities, each share within five standard deviations. With ``in_order = False``
    it may ask about any node.

    Args:
        verifier: What is checked.
        seed: Of the random trees.
        cases: How many of them.

    Raises:
        AssertionError: A law is broken; which, and on what tree.
    """
    law(isinstance(verifier, Verifier), "a verifier has verify", f"got {verifier!r}")
    choose = random.Random(seed)
    same = getattr(verifier, "same_tokens", True)
    for case in range(cases):
        params = SamplingParams(temperature=0.0 if case % 2 or not same else 1.0, seed=case)
        model = ToyAdapter(_SMALL, seed=case)
        prompt = random_tokens(choose, 3, _SMALL)
        tree = random_tree(choose, choose.randrange(9), _SMALL)
        if case % 3 == 0:  # and one that is right all the way
            right = _true_path(model, prompt, params, length=4)
            tree, _ = TokenTree.merge([tree, TokenTree.chain(right)], dedupe=case % 2 == 0)
        _check_walk(verifier, model, prompt, tree, params)
    if not same:
        for drawn in (False, True):
            _check_distribution(verifier, drawn=drawn)


class _Asked(StepTarget):
    """The target of one step, which remembers after which nodes it was asked."""

    def __init__(self, plan: StepPlan, logits: Tensor, params: SamplingParams) -> None:
        super().__init__(plan, logits, make_sampler(params))
        self.nodes: set[int] = set()

    def after_many(self, nodes: Sequence[int]) -> list[int]:
        self.nodes.update(nodes)
        return super().after_many(nodes)

    def guess_many(self, nodes: Sequence[int]) -> list[int]:
        self.nodes.update(nodes)
        return super().guess_many(nodes)

    def probabilities(self, node: int) -> Tensor:
        self.nodes.add(node)
        return super().probabilities(node)

    def uniform(self, node: int, draw: int) -> float:
        self.nodes.add(node)
        return super().uniform(node, draw)


def _target(
    model: ToyAdapter, prompt: Sequence[int], tree: TokenTree, params: SamplingParams
) -> _Asked:
    plan = StepPlan(0, tuple(prompt), tree)
    paths = [(), *(tree.path_tokens(node) for node in range(len(tree)))]
    rows = torch.stack([model.logits_after((*prompt, *path)) for path in paths])
    return _Asked(plan, rows, params)


def _true_path(
    model: ToyAdapter, prompt: Sequence[int], params: SamplingParams, *, length: int
) -> tuple[int, ...]:
    """Return the model's own next tokens."""
    run: tuple[int, ...] = ()
    while len(run) < length:
        text = (*prompt, *run)
        run += (_target(model, text, TokenTree(), params).after(ROOT),)
    return run


def _check_walk(
    verifier: Verifier,
    model: ToyAdapter,
    prompt: tuple[int, ...],
    tree: TokenTree,
    params: SamplingParams,
) -> None:
    where = (
        f"temperature {params.temperature:g}, tokens {tree.tokens}, parents {tree.parents}, "
        f"toy model {model.seed}, prompt {prompt}"
    )
    in_order = getattr(verifier, "in_order", True)
    target = _target(model, prompt, tree, params)
    run: list[Accepted] = []
    for token, node in verifier.verify(Proposal(tree), target):
        tokens = tuple(one.token for one in run)
        law(
            not run or run[-1].node is not None,
            "the bonus comes last, and once",
            f"after it came {token}; {where}",
        )
        expected = _target(model, (*prompt, *tokens), TokenTree(), params).after(ROOT)
        law(
            token == expected,
            "the tokens are the model's own",
            f"token {len(run)} is {token}, not {expected}; {where}",
        )
        if node is not None:
            law(
                0 <= node < len(tree) and tree.path_tokens(node) == (*tokens, token),
                "an accepted node stands for the accepted path",
                f"node {node} for the path {(*tokens, token)}; {where}",
            )
        early = sorted(
            node
            for node in target.nodes
            if in_order and node != ROOT and tree.path_tokens(node) != tokens[: tree.depths[node]]
        )
        law(
            not early,
            "the model is asked about the accepted path only, as far as tokens were taken",
            f"at token {len(run)} it was asked about the nodes {early}; {where}",
        )
        run.append(Accepted(token, node))
        law(len(run) <= len(tree) + 1, "a run ends with the bonus", where)
    law(bool(run) and run[-1].node is None, "a run ends with the bonus", f"it is {run}; {where}")
    tokens = tuple(one.token for one in run)
    paths = {tree.path_tokens(node) for node in range(len(tree))}
    # Where two nodes stand for one path, a verifier may follow either.
    law(
        tokens not in paths or len(paths) < len(tree),
        "what the model agrees with is accepted, not left to the bonus",
        f"{tokens} is in the tree; {where}",
    )


def _check_distribution(verifier: Verifier, *, drawn: bool) -> None:
    model, prompt = ToyAdapter(4, seed=1), (1, 2)
    row = model.logits_after(prompt).double()
    p = row.softmax(dim=-1).tolist()
    q = torch.tensor([0.1, 0.5, 0.3, 0.1])
    counts = [0] * 4
    for seed in range(_DRAWS):
        children = [1, 3]
        if drawn:
            children = random.Random(seed).choices(range(4), weights=q.tolist(), k=2)
        tree = TokenTree(tuple(children), (ROOT, ROOT))
        proposal = Proposal(tree, q.expand(2, 4) if drawn else None)
        params = SamplingParams(temperature=1.0, seed=seed)
        first = next(iter(verifier.verify(proposal, _target(model, prompt, tree, params))))
        counts[first.token] += 1
    for token, (count, share) in enumerate(zip(counts, p, strict=True)):
        sigma = (share * (1 - share) / _DRAWS) ** 0.5
        law(
            abs(count / _DRAWS - share) <= _SIGMAS * sigma,
            "the text has the model's distribution",
            f"token {token} came {count} times in {_DRAWS}, its probability is {share:.4f} "
            f"({'drawn' if drawn else 'certain'} guesses)",
        )
