"""Verification: which part of a proposal the target model agrees with."""

from __future__ import annotations

from collections.abc import Iterator

from decodekit.interfaces.strategy import Proposal, TargetTokens
from decodekit.interfaces.tree import ROOT
from decodekit.interfaces.verifier import Accepted

__all__ = ["ExactMatchVerifier"]


class ExactMatchVerifier:
    """Walks the tree along the target model's own tokens.

    From the anchor, the model's token is chosen; while a child carries it, the walk goes on there.
    *Every* node may be accepted, window nodes too, since every node's logits are the model's own
    for its path. Under greedy decoding the result is the greedy text. Under sampling a child is
    accepted with the probability that the model gives its token, the sum over distinct children of
    one parent: for deterministic drafts the acceptance of Algorithm 4 of Fu et al. (2024), without
    its division of 0 by 0.
    """

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        """Yield the accepted tokens and the bonus; see ``Verifier.verify``."""
        tree = proposal.tree
        # Without deduplication several nodes can stand for one path; all of them are followed.
        frontier = [ROOT]
        while True:
            token = target.after(frontier[0])
            frontier = [
                child
                for node in frontier
                for child in tree.children.get(node, ())
                if tree.tokens[child] == token
            ]
            if not frontier:
                yield Accepted(token, None)
                return
            yield Accepted(token, frontier[0])
