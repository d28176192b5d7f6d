"""What a constraint is: a grammar that follows a text token by token.

A constraint says which tokens may come next. The decoder chooses among those only, and follows the
branches of a token tree with forks. ``decodekit.guidance`` makes constraints from a regular
expression or a JSON schema.

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Constraint"]


@runtime_checkable
class Constraint(Protocol):
    """A grammar in the state after the tokens taken in so far; at first, after none.

    What it answers depends on these tokens alone. ``advance`` allows a token exactly where
    ``mask`` is True.
    """

    def fork(self) -> Constraint:
        """Return an independent copy in the same state, to follow one branch of a token tree."""
        ...

    def advance(self, token: int) -> bool:
        """Take in the next token of the text.

        Args:
            token: A token id.

        Returns:
            Whether the token is allowed. If not, the state is as before.

        Raises:
            GenerationError: The grammar cannot be followed any further.
        """
        ...

    def mask(self) -> Tensor:
        """Return which tokens may come next, a bool tensor [V] on the CPU that the caller may keep.

        V is the number of the model's logits. It can be larger than the tokenizer's vocabulary,
        and then the padding is never allowed; or smaller, and then the rest is cut off. Nothing is
        True if no token of the V can go on with the text or end it.

        Raises:
            GenerationError: The grammar cannot be followed any further.
        """
        ...
