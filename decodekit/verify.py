"""Verification: which part of a proposal the target model agrees with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decodekit.interfaces import Acceptance, Proposal, TargetTokens
from decodekit.plan import StepPlan
from decodekit.sampling import Sampler
from decodekit.tree import ROOT

__all__ = ["ExactMatchVerifier", "StepTarget"]


class StepTarget:
    """The target model's token after the anchor and each node of one step, chosen on demand.

    Args:
        plan: The step.
        logits: [1 + T, V], entry 0 after the anchor, entry ``node + 1`` after a node.
        sampler: How a token is chosen.
    """

    def __init__(self, plan: StepPlan, logits: Tensor, sampler: Sampler) -> None:
        self._positions = plan.positions[plan.anchor_row :]
        self._logits = logits
        self._sampler = sampler
        self._chosen: dict[int, int] = {}

    def after(self, node: int) -> int:
        """Return the model's token after ``node``, or after the anchor for ``ROOT``."""
        token = self._chosen.get(node)
        return self.after_many([node])[0] if token is None else token

    def after_many(self, nodes: Sequence[int]) -> list[int]:
        """Return the model's token after each of ``nodes``, in one go."""
        wanted = [node for node in dict.fromkeys(nodes) if node not in self._chosen]
        if wanted:
            if self._logits.device.type == "cpu":
                logits = _rows(self._logits, [node + 1 for node in wanted])
            else:
                # Every question costs a wait for the device: ask once, for all rows.
                wanted = list(range(ROOT, len(self._logits) - 1))
                logits = self._logits
            places = [self._positions[node + 1] + 1 for node in wanted]
            tokens = self._sampler.choose(logits, places)
            self._chosen.update(zip(wanted, tokens, strict=True))
        return [self._chosen[node] for node in nodes]


def _rows(logits: Tensor, entries: list[int]) -> Tensor:
    """Return the rows ``entries`` of ``logits``: a view where they follow each other."""
    first = entries[0]
    if entries == list(range(first, first + len(entries))):
        return logits[first : first + len(entries)]
    return logits[entries]


class ExactMatchVerifier:
    """Walks the tree along the target model's own tokens.

    From the anchor, the model's token is chosen; while a child carries it, the walk goes on there.
    *Every* node may be accepted, window nodes too, since every node's logits are the model's own
    for its path. Under greedy decoding the result is the greedy text. Under sampling a child is
    accepted with the probability that the model gives its token, the sum over distinct children of
    one parent: for deterministic drafts the acceptance of Algorithm 4 of Fu et al. (2024), without
    its division of 0 by 0.
    """

    def verify(self, proposal: Proposal, target: TargetTokens) -> Acceptance:
        """Return the accepted path and its tokens, the bonus last; see ``Verifier.verify``."""
        tree = proposal.tree
        tokens: list[int] = []
        reached = ROOT
        # Without deduplication several nodes can stand for one path; all of them are followed.
        frontier = [ROOT]
        while frontier:
            reached = frontier[0]
            token = target.after(reached)
            tokens.append(token)
            frontier = [
                child
                for node in frontier
                for child in tree.children.get(node, ())
                if tree.tokens[child] == token
            ]
        return Acceptance(path=tree.path(reached), tokens=tuple(tokens))
