"""What is accepted of a proposal: the protocol of a verifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from decodekit.interfaces.strategy import Proposal, TargetTokens

__all__ = ["Accepted", "Verifier"]


class Accepted(NamedTuple):
    """One token that the model agrees with.

    Attributes:
        token: Its id.
        node: The node that carries it, or any other one that stands for the same path; None for the
            bonus, the model's own token after the last accepted node.
    """

    token: int
    node: int | None


@runtime_checkable
class Verifier(Protocol):
    """Decides which part of a proposal the model would have said itself.

    Two attributes say what it does not promise; where one is missing it is True:

    * ``same_tokens = False``: under sampling it gives the model's distribution, but not the same
      tokens whatever the proposal.
    * ``in_order = False``: it may ask ``target`` about rows that are not the next of the text, in
      any order. Logits processors then need ``fork()``, and are copied for every path. In order,
      a processor is called once for each emitted token, and nobody copies it.
    """

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        """Yield the accepted tokens, from the anchor's child down, and then the bonus.

        It is asked for one after the other and left where the text ends, so that nothing is asked
        of ``target`` about what comes after the end.
        """
        ...
