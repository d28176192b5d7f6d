"""What may change the scores of the next token: logits processors and constraints.

A constraint is a grammar that follows a text token by token. It says which tokens may come next;
the decoder chooses among those only, and follows the branches of a token tree with forks.
``decodekit.decoder.grammar`` makes constraints from a regular expression or a JSON schema.

Shapes: B batch, L length of the prefix, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Constraint", "LogitsProcessor"]


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


class LogitsProcessor(Protocol):
    """Changes the scores of the next token; the processors of ``transformers`` do too."""

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores, [B, V], a new tensor or ``scores`` itself.

        Args:
            input_ids: [B, L] int64, the whole prefix of each row, on the device of ``scores``.
            scores: [B, V], left as it is.
        """
        ...
