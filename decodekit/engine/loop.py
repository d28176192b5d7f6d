"""The one decode loop, for every strategy and for one sequence or many."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from decodekit.engine.autocast import outside_autocast
from decodekit.engine.logprobs import TokenLogprob, token_logprobs
from decodekit.engine.observers import Observers
from decodekit.engine.runner import Cancelled, LocalRunner
from decodekit.engine.sampling import Sampler
from decodekit.engine.scoring import score_texts
from decodekit.engine.shaping import Shaper
from decodekit.engine.stopping import StopRules, cut_run
from decodekit.engine.target import StepTarget
from decodekit.errors import GenerationError, NoStopIteration, TreeError
from decodekit.interfaces.events import StepEvent
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.strategy import Budget, Proposal, Proposer, StepOutcome
from decodekit.interfaces.verifier import Verifier

__all__ = ["SequenceState", "StepRecord", "decode"]

_requests = itertools.count()  # numbers for observers; taking the next one is atomic


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """One sequence under way, with all that is its own.

    Attributes:
        committed: The prompt, at least one token, and what has been decoded.
        proposer: A fresh proposer.
        verifier: Decides what is accepted.
        sampler: Chooses the model's token after a row.
        rules: The stop rules of this request, fresh.
        shaper: Changes logits before a token is chosen; None changes nothing.
        logprobs: Log-probabilities are reported with so many of the most probable tokens; None
            reports nothing.
        prompt_logprobs: Likewise for the tokens of the prompt.
        prompt_scores: Those of the prompt, once they are known: None for its first token.
    """

    committed: list[int]
    proposer: Proposer
    verifier: Verifier
    sampler: Sampler
    rules: StopRules
    shaper: Shaper | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_scores: list[TokenLogprob | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step emitted for one sequence.

    Attributes:
        sequence: Which sequence.
        tokens: The new tokens, at least one.
        nodes: T, the sequence's guessed nodes in the pass.
        forward_seconds: Wall time in the model; on a GPU, until its calls returned.
        logprobs: One entry per token, if they were asked for.
    """

    sequence: int
    tokens: tuple[int, ...]
    nodes: int
    forward_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None


def decode(
    sequences: Sequence[SequenceState],
    *,
    runner: LocalRunner,
    max_nodes: int,
    cancelled: Callable[[], bool] = lambda: False,
    observers: Observers | None = None,
) -> Generator[list[StepRecord], None, None]:
    """Yield, step by step, the accepted runs of all sequences that are not at their end yet.

    Every step is one forward pass for all of them; a sequence that ends leaves the batch. Where a
    sequence fails inside its run, what all of them accepted is yielded before the error is raised.

    Args:
        sequences: One or more; they are changed.
        runner: Runs the model; its cache is started anew.
        max_nodes: Nodes of a sequence for which scratch rows are kept in the cache.
        cancelled: Asked between passes whether to give up.
        observers: Told of every finished step, after its records were taken.

    Raises:
        GenerationError: A prompt is empty, or the model's output is broken; with the step.
        TreeError: A proposer returned more than its budget.
        Exception: Whatever a processor, a constraint or a criterion raises, with the attribute
            ``sequence``.
    """
    if not all(state.committed for state in sequences):
        raise GenerationError("the prompt is empty; give at least one token")
    active = [
        _Turn(number, state)
        for number, state in enumerate(sequences)
        if _goes_on(state) or state.prompt_logprobs is not None
    ]
    if not active:
        return
    longest = max(len(state.committed) + state.rules.remaining for state in sequences)
    runner.start(batch=len(active), capacity=longest + max_nodes, cancelled=cancelled)
    try:
        with outside_autocast():
            active = _score_prompts(active, runner, cancelled)
    except Cancelled:
        return
    step, request, before = 0, next(_requests), 0.0
    while active and not cancelled():
        try:
            with outside_autocast():  # not around the yield: what the reader does is its business
                if step == 0 and not any(runner.cache.lengths):  # no prompt was scored
                    runner.share([turn.state.committed for turn in active])
                failed = _step(active, runner, max_nodes)
            seconds = runner.forward_seconds - before
            shown = [turn for turn in active if turn.tokens]
            # Shown before anything is learnt from it: the reader need not wait for that.
            try:
                if shown:
                    yield [turn.record(seconds) for turn in shown]
            finally:  # also where the reader leaves with this step
                if observers:
                    for turn in shown:
                        observers.notify(turn.event(request, step, seconds))
            for turn in failed:
                turn.fail()
            going_on = [place for place, turn in enumerate(active) if _goes_on(turn.state)]
            if len(going_on) < len(active):
                active = [active[place] for place in going_on]
                if active:
                    runner.keep(going_on)
            with outside_autocast():
                for turn in active:
                    with turn.named():
                        turn.learn()
            before = runner.forward_seconds
        except Cancelled:
            return
        except GenerationError as error:
            error.step = step
            error.args = (f"{_place(error, len(sequences))}step {step}: {error}",)
            raise
        except Exception as error:
            _note(error, f"{_place(error, len(sequences))}step {step}")
            raise
        step += 1


def _step(active: Sequence[_Turn], runner: LocalRunner, max_nodes: int) -> list[_Turn]:
    """Run one step of all sequences: propose, one pass, judge, commit; return those that failed."""
    for turn, prefix in zip(active, runner.cache.lengths, strict=True):
        budget = _budget(turn.state, runner, max_nodes)
        with turn.named():
            turn.propose(budget, prefix=prefix, vocab_size=runner.adapter.vocab_size)
    logits = runner.run([turn.plan for turn in active])
    for turn, rows in zip(active, logits, strict=True):
        with turn.named():
            turn.judge(rows)
    failed = [turn for turn in active if turn.failure is not None]
    if not failed:
        runner.commit([turn.accepted for turn in active])
    return failed


def _score_prompts(
    turns: list[_Turn], runner: LocalRunner, cancelled: Callable[[], bool]
) -> list[_Turn]:
    """Score the prompts for which that was asked for; return the turns that go on."""
    tops = [turn.state.prompt_logprobs for turn in turns]
    if all(top is None for top in tops):
        return turns
    texts = [turn.state.committed for turn in turns]
    for turn, scores in zip(
        turns, score_texts(runner, texts, tops, cancelled=cancelled), strict=True
    ):
        turn.state.prompt_scores = scores
    going_on = [place for place, turn in enumerate(turns) if _goes_on(turn.state)]
    if 0 < len(going_on) < len(turns):
        runner.keep(going_on)
    return [turns[place] for place in going_on]


class _Turn:
    """What one sequence does in a step: propose, judge, learn."""

    plan: StepPlan
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    failure: Exception | None

    def __init__(self, number: int, state: SequenceState) -> None:
        self.state = state
        self._number = number

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let an error inside the block say which sequence it is about."""
        try:
            yield
        except Exception as error:
            error.sequence = self._number  # type: ignore[attr-defined]  # of any kind
            raise

    def propose(self, budget: Budget, *, prefix: int, vocab_size: int) -> None:
        """Make the step's plan; the cache holds ``prefix`` tokens."""
        state = self.state
        with NoStopIteration(f"propose() of {type(state.proposer).__name__}"):
            self._proposal = state.proposer.propose(state.committed, budget)
        _check(self._proposal, budget, state.proposer, vocab_size)
        self.plan = StepPlan(prefix, tuple(state.committed[prefix:]), self._proposal.tree)

    def judge(self, logits: Tensor) -> None:
        """Accept and commit what the model agrees with, as far as the stop rules let it.

        What fails on the way is left in ``failure``: the tokens before it are part of the text.

        Args:
            logits: [1 + T, V].
        """
        state, tree = self.state, self._proposal.tree
        if state.shaper is not None:
            state.shaper.begin(state.committed, tree, logits)
        self._target = StepTarget(self.plan, logits, state.sampler, state.shaper)
        run = state.verifier.verify(self._proposal, self._target)
        self.tokens, last, self.failure = cut_run(run, state.rules)
        self.accepted = tree.path(last)
        if state.shaper is not None and self.failure is None and _goes_on(state):
            try:
                state.shaper.commit(last, self.tokens[-1])
            except Exception as error:
                self.failure = error
        self._target.settle()
        self._logprobs = None
        if state.logprobs is not None and self.tokens:
            rows = [0, *(node + 1 for node in self.accepted)][: len(self.tokens)]
            self._logprobs = token_logprobs(logits[rows], self.tokens, top=state.logprobs)
        state.committed.extend(self.tokens)

    def fail(self) -> None:
        """Raise the failure of the step."""
        assert self.failure is not None
        with self.named(), NoStopIteration("the verifier or the tokenizer"):
            raise self.failure

    def record(self, seconds: float) -> StepRecord:
        """Return what the step emitted; ``seconds`` were spent in the model."""
        return StepRecord(
            sequence=self._number,
            tokens=self.tokens,
            nodes=len(self._proposal.tree),
            forward_seconds=seconds,
            logprobs=self._logprobs,
        )

    def event(self, request: int, step: int, seconds: float) -> StepEvent:
        """Return what observers are told of the step; the arguments are ``StepEvent``'s."""
        return StepEvent(
            request=request,
            sequence=self._number,
            step=step,
            tokens=self.tokens,
            nodes=len(self._proposal.tree),
            accepted=len(self.accepted),
            forward_seconds=seconds,
            finish_reason=self.state.rules.finish_reason,
        )

    def learn(self) -> None:
        """Tell the proposer what came of its proposal."""
        outcome = StepOutcome(
            plan=self.plan,
            proposal=self._proposal,
            target=self._target,
            accepted=self.accepted,
            tokens=self.tokens,
            committed=self.state.committed,
        )
        with NoStopIteration(f"observe() of {type(self.state.proposer).__name__}"):
            self.state.proposer.observe(outcome)


def _goes_on(state: SequenceState) -> bool:
    return state.rules.finish_reason is None


def _place(error: Exception, batch: int) -> str:
    sequence = getattr(error, "sequence", None)
    return f"prompt {sequence} of the batch: " if batch > 1 and sequence is not None else ""


def _note(error: Exception, where: str) -> None:
    """Let an exception of somebody else say where it came up; its own text is left alone."""
    if sys.version_info >= (3, 11):
        error.add_note(where)


def _budget(state: SequenceState, runner: LocalRunner, max_nodes: int) -> Budget:
    done = len(state.committed)
    room = runner.cache.capacity - done
    limit = runner.horizon(done)
    return Budget(
        nodes=min(max_nodes, room),
        depth=room if limit is None else min(room, limit - done),
        tokens=state.rules.remaining,
    )


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
    probs = proposal.draft_probs
    if probs is not None and probs.shape != (len(tree), vocab_size):
        raise TreeError(
            f"{name} gave draft_probs of shape {list(probs.shape)}; they must be "
            f"[{len(tree)}, {vocab_size}]"
        )
    deepest = max(tree.depths, default=0)
    if len(tree) > budget.nodes or deepest > budget.depth:
        raise TreeError(
            f"{name} proposed {len(tree)} nodes down to depth {deepest}; its "
            f"budget is {budget.nodes} nodes and depth {budget.depth} "
            "(use TokenTree.limited to keep to it)"
        )
