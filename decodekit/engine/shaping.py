"""What changes a sequence's logits before a token is chosen: processors, then a constraint.

Each row is changed on its own prefix: the committed tokens and the path to it. Rows are changed
when they are asked for, so only those that the walk reaches are paid for: each row of the text
once, in order. That is the contract with a processor, which may therefore keep a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decodekit.engine.filters import require_finite
from decodekit.engine.processors import name_of
from decodekit.errors import GenerationError, NoStopIteration
from decodekit.interfaces.logits import Constraint, LogitsProcessor
from decodekit.interfaces.tree import EMPTY_TREE, TokenTree

__all__ = ["Shaper"]


@dataclass(frozen=True, slots=True)
class _State:
    """Processors and constraint at one node."""

    processors: tuple[LogitsProcessor, ...]
    constraint: Constraint | None

    def after(self, token: int, *, branches: bool) -> _State | None:
        """Return a copy that has taken in ``token``; None if the constraint rules it out.

        Args:
            token: The token.
            branches: Whether processors are copied, too, since more than one token is tried.
        """
        constraint = self.constraint
        if constraint is not None:
            constraint = _forked(constraint)
            with NoStopIteration(f"advance() of the constraint {type(constraint).__name__}"):
                allowed = constraint.advance(token)
            if not allowed:
                return None
        processors = tuple(map(_fork, self.processors)) if branches else self.processors
        return _State(processors, constraint)


class Shaper:
    """The processors and the constraint of one sequence.

    Args:
        processors: Applied in this order. One that has ``fork()`` is copied by it, so that the
            caller's own stays as it is.
        constraint: Applied last, in its starting state; it is not changed.
        branches: Whether rows are asked about in any order. A processor is then copied for every
            path, so that each copy is called once for every token of its path, in order; one that
            keeps a state needs ``fork()``. If not, rows are those of one text: each is asked about
            once, after the row of the token before.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor] = (),
        constraint: Constraint | None = None,
        *,
        branches: bool = False,
    ) -> None:
        self._root: _State | None = _State(
            tuple(map(_fork, processors)), None if constraint is None else _forked(constraint)
        )
        self._constraint = type(constraint).__name__
        self._branches = branches
        self.begin((), EMPTY_TREE, torch.empty(0))

    def begin(self, committed: Sequence[int], tree: TokenTree, logits: Tensor) -> None:
        """Turn to a new step.

        Args:
            committed: The tokens so far, the prompt's first.
            tree: The guesses below the last of them.
            logits: [1 + T, V], entry 0 after the anchor, entry ``node + 1`` after a node.
        """
        self._committed = committed
        self._tree = tree
        self._logits = logits
        # By path and not by node: of two nodes that stand for one path, one is asked about.
        self._states: dict[tuple[int, ...], _State | None] = {(): self._root}
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self._reached: tuple[int, ...] | None = None  # the path of the last row

    def row(self, node: int) -> Tensor:
        """Return the changed logits [V] after ``node``, in float32 or wider.

        No text reaches a node that the constraint rules out; where there are branches, its logits
        are returned as they are.

        Raises:
            GenerationError: The model's logits are broken, a processor returns something else than
                scores, no token is left, or the row is not the next of the text.
        """
        path = self._tree.path_tokens(node)
        row = self._rows.get(path)
        if row is None:
            row = self._rows[path] = self._shaped(node, path)
        return row

    def commit(self, node: int, bonus: int) -> None:
        """Go on from ``node``, the last accepted one, and the token after it."""
        self.row(node)  # whoever accepted the bonus unasked: a processor has to have seen it
        state = self._state(node)
        if self._reached != self._tree.path_tokens(node):
            self._require_order()
        self._root = state and state.after(bonus, branches=self._branches)

    @torch.no_grad()
    def _shaped(self, node: int, path: tuple[int, ...]) -> Tensor:
        state = self._state(node)
        raw = self._logits[node + 1 : node + 2]
        require_finite(raw.amax(dim=-1))
        scores = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True)
        if state is None:
            if path and self._branches:
                return scores[0]
            raise GenerationError(
                f"the constraint {self._constraint} does not allow with advance() what it allows "
                "with mask()"
            )
        if self._reached != (path[:-1] if path else None):
            self._require_order()
        self._reached = path
        input_ids = torch.tensor([[*self._committed, *path]], device=scores.device)
        for processor in state.processors:
            with NoStopIteration(f"the logits processor {name_of(processor)}"):
                scores = processor(input_ids, scores)
            if not _is_scores(scores, raw):
                raise GenerationError(
                    f"the logits processor {name_of(processor)} must return scores of shape "
                    f"{list(raw.shape)} in floating point"
                )
            if not bool((scores < torch.inf).all()):
                raise GenerationError(
                    f"the logits processor {name_of(processor)} returned NaN or infinite scores"
                )
        if state.constraint is not None:
            with NoStopIteration(f"mask() of the constraint {self._constraint}"):
                allowed = state.constraint.mask()
            if not (
                isinstance(allowed, Tensor)
                and allowed.dtype == torch.bool
                and allowed.shape == scores.shape[1:]
            ):
                raise GenerationError(
                    f"the constraint {type(state.constraint).__name__} must return a bool mask of "
                    f"shape [{scores.shape[1]}]"
                )
            scores = scores.masked_fill(~allowed.to(scores.device), float("-inf"))
        if bool((scores == float("-inf")).all()):
            raise GenerationError(
                f"{self._named(state)} leave no token to choose from; drop or relax one of them"
            )
        return scores[0]

    def _named(self, state: _State) -> str:
        """Return what shapes rows, in words."""
        parts = [f"the logits processors ({', '.join(map(name_of, state.processors))})"]
        if state.constraint is not None:
            parts = [*parts, "the constraint"] if state.processors else ["the constraint"]
        return " and ".join(parts)

    def _state(self, node: int) -> _State | None:
        path = self._tree.path_tokens(node)
        if path not in self._states:
            self.row(self._tree.parents[node])  # a processor with a state has to have seen it
            above = self._states[path[:-1]]
            self._states[path] = above and above.after(path[-1], branches=self._branches)
        return self._states[path]

    def _require_order(self) -> None:
        """Raise where a row that is not the next of the text would spoil a processor's state."""
        if not self._branches and self._root is not None and self._root.processors:
            raise GenerationError(
                "the verifier asked about a token that is not the next of the text, which a logits "
                "processor must not see; a verifier that does so has the attribute in_order = False"
            )


def _is_scores(scores: object, like: Tensor) -> bool:
    return isinstance(scores, Tensor) and scores.shape == like.shape and scores.is_floating_point()


def _fork(processor: LogitsProcessor) -> LogitsProcessor:
    fork = getattr(processor, "fork", None)
    if not callable(fork):
        return processor
    with NoStopIteration(f"fork() of {name_of(processor)}"):
        copy: LogitsProcessor = fork()
    if not callable(copy):
        raise GenerationError(f"fork() of {name_of(processor)} must return a copy of it")
    return copy


def _forked(constraint: Constraint) -> Constraint:
    with NoStopIteration(f"fork() of the constraint {type(constraint).__name__}"):
        copy = constraint.fork()
    if not isinstance(copy, Constraint):
        raise GenerationError(f"fork() of {type(constraint).__name__} must return a copy of it")
    return copy
