"""Log-probabilities of the tokens that a request produced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TokenLogprob", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How probable the model held one new token.

    Attributes:
        token: Its id.
        logprob: The natural logarithm of its probability, from the model's own logits: before
            processors, constraint, temperature and filters.
        top: The k most probable tokens and their log-probabilities, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, tokens: Sequence[int], *, top: int) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of R tokens.

    Args:
        logits: [R, V], the model's logits that the tokens were chosen after.
        tokens: The tokens, length R.
        top: k, how many of the most probable tokens are reported with each; at most V are.
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    chosen = logprobs[range(len(tokens)), list(tokens)].tolist()
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    )
