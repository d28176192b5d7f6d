"""Verification by rejection, for drafts that were drawn at random.

The law is that of speculative sampling (Leviathan et al., 2023, arXiv 2211.17192) for several
candidates in turn (SpecInfer, Miao et al., 2023, arXiv 2305.09781; for certain guesses Algorithm 4
of Fu et al., 2024, arXiv 2402.02057): a draft x, drawn from q, is accepted with probability
min(1, p(x) / q(x)); if it is not, the next one is judged against what is left of p, the positive
part of p - q. The token that comes out has the distribution p, whatever the drafts are.

The functions are plain arithmetic on arrays of V numbers, fractions included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from decodekit.errors import GenerationError
from decodekit.interfaces.strategy import Proposal, TargetTokens
from decodekit.interfaces.tree import ROOT
from decodekit.interfaces.verifier import Accepted

__all__ = ["RejectionVerifier", "accept_probability", "draw", "residual"]

Array: TypeAlias = "np.ndarray[Any, Any]"


def accept_probability(p: Array, q: Array | None, token: int) -> Any:
    """Return the probability that a draft is accepted, min(1, p(x) / q(x)).

    Args:
        p: What is left of the target's distribution, [V].
        q: The distribution that the draft was drawn from, [V]; None if it was certain.
        token: The draft, x.

    Raises:
        GenerationError: ``q`` says that the draft cannot have been drawn.
    """
    if q is None:
        return p[token]
    if not q[token] > 0:
        raise GenerationError(f"draft_probs give token {token} probability 0, yet it was proposed")
    return min(p[token] / q[token], 1)


def residual(p: Array, q: Array | None, token: int) -> Array:
    """Return what is left of the target's distribution after a draft was rejected, [V].

    The arguments are those of ``accept_probability``. Where nothing is left, which exact numbers
    rule out since such a draft is never rejected, ``p`` is returned.
    """
    if q is None:
        left = p.copy()
        left[token] = 0
    else:
        left = np.maximum(p - q, 0)
    total = left.sum()
    return left / total if total > 0 else p


def draw(p: Array, number: Any) -> int:
    """Return the token at ``number``, in [0, 1), of the cumulative distribution of p, [V].

    A token of probability 0 is never returned.
    """
    cdf = p.cumsum()
    place = int(np.searchsorted(cdf, number * cdf[-1], side="right"))
    return min(place, int(np.flatnonzero(p)[-1]))  # a product may be rounded up to the very end


class RejectionVerifier:
    """Accepts drafts so that the text has the target's distribution.

    Unlike under exact match, the text under sampling depends on the drafts, so two strategies give
    different texts of one distribution. Under greedy decoding the text is the greedy one.
    """

    same_tokens = False

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        """Yield the accepted tokens and the bonus; see ``Verifier.verify``."""
        tree = proposal.tree
        reached = ROOT
        while True:
            p = _as_array(target.probabilities(reached))
            accepted = None
            tries = 0
            for child in tree.children.get(reached, ()):
                q = None if proposal.draft_probs is None else _as_array(proposal.draft_probs[child])
                token = tree.tokens[child]
                if target.uniform(reached, tries) < accept_probability(p, q, token):
                    accepted = child
                    break
                p = residual(p, q, token)
                tries += 1
            if accepted is None:
                yield Accepted(draw(p, target.uniform(reached, tries)), None)
                return
            yield Accepted(tree.tokens[accepted], accepted)
            reached = accepted


def _as_array(probabilities: Tensor) -> Array:
    """Return a tensor [V] as float64 on the host, with sum 1 unless it is 0."""
    array: Array = probabilities.cpu().double().numpy()
    return array / (array.sum() or 1.0)
