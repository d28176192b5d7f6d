"""What the target model says after the rows of one step: its tokens and its distributions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from decodekit.engine.noise import uniform
from decodekit.engine.sampling import Sampler
from decodekit.engine.shaping import Shaper
from decodekit.errors import GenerationError
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT

__all__ = ["StepTarget"]

_FEW = 8
"""So many rows are asked for at once: a question took as long as several rows."""


class StepTarget:
    """The ``TargetTokens`` of one step; everything is chosen on demand.

    Args:
        plan: The step.
        logits: [1 + T, V], entry 0 after the anchor, entry ``node + 1`` after a node.
        sampler: How a token is chosen.
        shaper: Changes a row before a token is chosen, and has begun this step; None changes
            nothing.
    """

    def __init__(
        self, plan: StepPlan, logits: Tensor, sampler: Sampler, shaper: Shaper | None = None
    ) -> None:
        self._positions = plan.positions[plan.anchor_row :]
        self._logits = logits
        self._sampler = sampler
        self._shaper = shaper
        self._chosen: dict[int, int] = {}  # the target's tokens
        self._guesses: dict[int, int] = {}  # what they would be if nothing changed the rows
        if shaper is None:
            self._guesses = self._chosen

    def after(self, node: int) -> int:
        """Return the model's token after ``node``, or after the anchor for ``ROOT``."""
        return self.after_many([node])[0]

    def after_many(self, nodes: Sequence[int]) -> list[int]:
        """Return the model's token after each of ``nodes``, in one go."""
        if self._shaper is None:
            return self.guess_many(nodes)
        for node in nodes:
            if node not in self._chosen:
                row = self._shaper.row(node)[None]
                (self._chosen[node],) = self._sampler.choose(row, [self._place(node)])
        return [self._chosen[node] for node in nodes]

    def guess_many(self, nodes: Sequence[int]) -> list[int]:
        """Return what is likely after each of ``nodes``; see ``TargetTokens.guess_many``."""
        self._choose_plain([node for node in nodes if node not in self._chosen])
        return [
            self._guesses[node] if token is None else token
            for node, token in ((node, self._chosen.get(node)) for node in nodes)
        ]

    def probabilities(self, node: int) -> Tensor:
        """Return the distribution [V] that the token after ``node`` is drawn from."""
        row = self._logits[node + 1] if self._shaper is None else self._shaper.row(node)
        return self._sampler.probabilities(row[None], [self._place(node)])[0]

    def uniform(self, node: int, draw: int) -> float:
        """Return a number in [0, 1) for the token after ``node``."""
        return uniform(self._sampler.seed, self._place(node), draw=draw)

    def settle(self) -> None:
        """End the walk: the shaper is not asked any more, since its processors know one text only.

        What somebody asks from now on, to learn from the step, is answered as by ``guess_many``.
        """
        self._shaper = None

    def _choose_plain(self, nodes: Sequence[int]) -> None:
        wanted = [node for node in dict.fromkeys(nodes) if node not in self._guesses]
        if not wanted:
            return
        few = self._sampler.in_bulk and len(self._logits) <= _FEW
        if self._logits.device.type != "cpu" or few:
            # Every question costs a wait for the device, or as much as the rows: ask for all.
            with suppress(GenerationError):  # perhaps of a row that nobody needs
                self._choose(list(range(ROOT, len(self._logits) - 1)))
                return
        self._choose(wanted)

    def _choose(self, nodes: list[int]) -> None:
        logits = _rows(self._logits, [node + 1 for node in nodes])
        tokens = self._sampler.choose(logits, [self._place(node) for node in nodes])
        self._guesses.update(zip(nodes, tokens, strict=True))

    def _place(self, node: int) -> int:
        """Return the absolute position of the token after ``node``."""
        return self._positions[node + 1] + 1


def _rows(logits: Tensor, entries: list[int]) -> Tensor:
    """Return the rows ``entries`` of ``logits``: a view where they follow each other."""
    first = entries[0]
    if entries == list(range(first, first + len(entries))):
        return logits[first : first + len(entries)]
    return logits[entries]
