"""The one decode loop, for every strategy."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from decodekit.errors import GenerationError, TreeError
from decodekit.interfaces import Budget, Proposal, Proposer, StepOutcome, Verifier
from decodekit.plan import StepPlan
from decodekit.runner import LocalRunner
from decodekit.sampling import Sampler
from decodekit.stopping import StopRules, cut_run
from decodekit.verify import StepTarget

__all__ = ["StepRecord", "decode"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step emitted.

    Attributes:
        tokens: The new tokens, at least one.
        nodes: T, the guessed nodes of the pass.
        forward_seconds: Wall time in the model; on a GPU, until its calls returned.
    """

    tokens: tuple[int, ...]
    nodes: int
    forward_seconds: float


def decode(
    prompt: Sequence[int],
    *,
    runner: LocalRunner,
    proposer: Proposer,
    verifier: Verifier,
    sampler: Sampler,
    rules: StopRules,
    max_nodes: int,
) -> Generator[StepRecord, None, None]:
    """Yield the accepted runs that continue ``prompt``, until ``rules`` end the text.

    Args:
        prompt: Token ids, at least one.
        runner: Runs the model; its cache is started anew.
        proposer: A fresh proposer.
        verifier: Decides what is accepted.
        sampler: Chooses the model's token after a row.
        rules: The stop rules of this request, fresh.
        max_nodes: Nodes for which scratch rows are kept in the cache.

    Raises:
        GenerationError: The prompt is empty, or the model's output is broken; with the step.
        TreeError: The proposer returned more than its budget.
    """
    if not prompt:
        raise GenerationError("the prompt is empty; give at least one token")
    committed = list(prompt)
    limit = runner.adapter.max_positions
    total = len(committed) + rules.remaining
    runner.start(capacity=total + max_nodes if limit is None else min(total + max_nodes, limit))
    step = 0
    while rules.finish_reason is None:
        done = len(committed)
        room = runner.cache.capacity - done
        budget = Budget(
            nodes=min(max_nodes, room),
            depth=room if limit is None else min(room, limit - done),
            tokens=rules.remaining,
        )
        before = runner.forward_seconds
        try:
            proposal = proposer.propose(committed, budget)
            _check(proposal, budget, proposer, runner.adapter.vocab_size)
            prefix = runner.cache.lengths[0]
            plan = StepPlan(prefix, tuple(committed[prefix:]), proposal.tree)
            (logits,) = runner.run([plan])
            target = StepTarget(plan, logits, sampler)
            acceptance = verifier.verify(proposal, target)
            tokens = cut_run(acceptance.tokens, rules)
            accepted = acceptance.path[: len(tokens)]
            runner.commit([accepted])
            committed.extend(tokens)
            # Shown before anything is learnt from it: the reader need not wait for that.
            yield StepRecord(tokens, len(proposal.tree), runner.forward_seconds - before)
            if rules.finish_reason is None:
                proposer.observe(StepOutcome(plan, proposal, target, accepted, tokens, committed))
        except GenerationError as error:
            error.step = step
            raise
        step += 1


def _check(proposal: Proposal, budget: Budget, proposer: Proposer, vocab_size: int) -> None:
    """Refuse what is no proposal, has unknown tokens, or has no room in cache or positions."""
    name = type(proposer).__name__
    if not isinstance(proposal, Proposal):
        raise TreeError(f"{name} must return a Proposal, not a {type(proposal).__name__}")
    tree = proposal.tree
    for token in tree.tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise TreeError(
                f"{name} proposed {token!r}, which is no token of 0 .. {vocab_size - 1}"
            )
    deepest = max(tree.depths, default=0)
    if len(tree) > budget.nodes or deepest > budget.depth:
        raise TreeError(
            f"{name} proposed {len(tree)} nodes down to depth {deepest}; its "
            f"budget is {budget.nodes} nodes and depth {budget.depth} "
            "(use TokenTree.limited to keep to it)"
        )
