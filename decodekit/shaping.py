"""What changes a sequence's logits before a token is chosen: processors, then a constraint.

Each row is changed on its own prefix: the committed tokens and the path to it. Rows are changed
when they are asked for, so only those that the walk reaches are paid for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decodekit.constraint import Constraint
from decodekit.errors import GenerationError
from decodekit.filters import require_finite
from decodekit.processors import LogitsProcessor, name_of
from decodekit.tree import EMPTY_TREE, TokenTree

__all__ = ["Shaper"]


@dataclass(frozen=True, slots=True)
class _State:
    """Processors and constraint at one node."""

    processors: tuple[LogitsProcessor, ...]
    constraint: Constraint | None

    def after(self, token: int) -> _State | None:
        """Return a copy that has taken in ``token``; None if the constraint rules it out."""
        constraint = self.constraint
        if constraint is not None:
            constraint = _forked(constraint)
            if not constraint.advance(token):
                return None
        return _State(tuple(map(_fork, self.processors)), constraint)


class Shaper:
    """The processors and the constraint of one sequence.

    Args:
        processors: Applied in this order. One that keeps a state has ``fork()``, which returns a
            copy; a copy is called once for every token of a path, in order.
        constraint: Applied last, in its starting state; it is not changed.
    """

    def __init__(
        self, processors: Sequence[LogitsProcessor] = (), constraint: Constraint | None = None
    ) -> None:
        self._root = _State(
            tuple(map(_fork, processors)), None if constraint is None else _forked(constraint)
        )
        self.begin((), EMPTY_TREE, torch.empty(0))

    def begin(self, committed: Sequence[int], tree: TokenTree, logits: Tensor) -> None:
        """Turn to a new step.

        Args:
            committed: The tokens so far, the prompt's first.
            tree: The guesses below the last of them.
            logits: [1 + T, V], entry 0 after the anchor, entry ``node + 1`` after a node.
        """
        self._committed = committed
        self._length = len(committed)  # the list grows when the step is committed
        self._tree = tree
        self._logits = logits
        # By path and not by node: of two nodes that stand for one path, one is asked about.
        self._states: dict[tuple[int, ...], _State | None] = {(): self._root}
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def row(self, node: int) -> Tensor:
        """Return the changed logits [V] after ``node``, in float32 or wider.

        No text reaches a node that the constraint rules out; its logits are returned as they are.

        Raises:
            GenerationError: The model's logits are broken, a processor returns something else than
                scores, or no token is left.
        """
        path = self._tree.path_tokens(node)
        row = self._rows.get(path)
        if row is None:
            row = self._rows[path] = self._shaped(node, path)
        return row

    def commit(self, node: int, bonus: int) -> None:
        """Go on from ``node``, the last accepted one, and the token after it."""
        state = self._state(node)
        after = state and state.after(bonus)
        if after is None:
            raise GenerationError(
                f"the constraint {type(self._root.constraint).__name__} does not allow with "
                "advance() what it allows with mask()"
            )
        self._root = after

    @torch.no_grad()
    def _shaped(self, node: int, path: tuple[int, ...]) -> Tensor:
        state = self._state(node)
        raw = self._logits[node + 1 : node + 2]
        require_finite(raw.amax(dim=-1))
        scores = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True)
        if state is None:
            return scores[0]
        input_ids = torch.tensor([[*self._committed[: self._length], *path]], device=scores.device)
        for processor in state.processors:
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
            raise GenerationError("logits processors and constraint leave no token to choose from")
        return scores[0]

    def _state(self, node: int) -> _State | None:
        path = self._tree.path_tokens(node)
        if path not in self._states:
            self.row(self._tree.parents[node])  # a processor with a state has to have seen it
            above = self._states[path[:-1]]
            self._states[path] = above and above.after(path[-1])
        return self._states[path]


def _is_scores(scores: object, like: Tensor) -> bool:
    return isinstance(scores, Tensor) and scores.shape == like.shape and scores.is_floating_point()


def _fork(processor: LogitsProcessor) -> LogitsProcessor:
    fork = getattr(processor, "fork", None)
    copy = fork() if callable(fork) else processor
    if not callable(copy):
        raise GenerationError(f"fork() of {name_of(processor)} must return a copy of it")
    return copy


def _forked(constraint: Constraint) -> Constraint:
    copy = constraint.fork()
    if not isinstance(copy, Constraint):
        raise GenerationError(f"fork() of {type(constraint).__name__} must return a copy of it")
    return copy
