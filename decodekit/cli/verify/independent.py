"""A certificate's second reference, which shares no code with the adapter.

Whatever an adapter computes wrongly, it computes wrongly for every strategy, and comparing them
shows nothing. Here the tokens of autoregressive decoding are compared with what the model's own
forward pass says over prompt and answer at once: no cache, no mask, no attention of ours.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decodekit.adapters.model_facts import is_transformers_model
from decodekit.adapters.plain_forward import LARGEST, plain_logits
from decodekit.cli.verify.certificate import Verdict, judge
from decodekit.decoder.decoder import Decoder
from decodekit.decoder.prompt import Prompt
from decodekit.decoder.result import GenerationResult
from decodekit.errors import DecodekitError, shortened
from decodekit.interfaces.adapter import HasHorizon, KVCache, ModelAdapter
from decodekit.interfaces.plan import StepPlan

__all__ = ["Independent", "compare_with_the_model"]


class Independent(NamedTuple):
    """What the model's own forward pass says of an answer.

    Attributes:
        verdict: How the answer compares; None if it could not be asked.
        reason: Why it could not, in one clause.
    """

    verdict: Verdict | None
    reason: str | None = None


def compare_with_the_model(
    reference: Decoder,
    prompt: Prompt,
    answer: GenerationResult,
    *,
    tolerance: float,
    **options: Any,
) -> Independent:
    """Judge an answer of autoregressive decoding by the model's own forward pass.

    Args:
        reference: The decoder that gave the answer.
        prompt: What it was asked.
        answer: Its answer.
        tolerance: The largest gap of a tie; see ``certificate.TOLERANCES``.
        options: The options of the request.
    """
    adapter = reference.adapter
    if not is_transformers_model(getattr(adapter, "model", None)):
        name = reference.adapter_name
        return Independent(None, f"the adapter {name!r} runs no transformers model")
    replay = reference.with_strategy("autoregressive", verifier="exact_match")
    replay.adapter = _PlainAdapter(adapter, [*answer.prompt_tokens, *answer.tokens])
    try:
        return Independent(judge(replay, prompt, answer, tolerance=tolerance, **options))
    except _ForwardError as error:
        return Independent(None, str(error))


class _ForwardError(DecodekitError):
    """The model's own forward pass does not run."""


class _PlainAdapter:
    """The model's own forward pass along one text, in the form of an adapter.

    Args:
        adapter: What decodes with the model; it is asked for facts only.
        text: All tokens; only what follows a part of it can be asked for.
    """

    def __init__(self, adapter: ModelAdapter, text: Sequence[int]) -> None:
        self.model: Any = adapter.model  # type: ignore[attr-defined]
        self.vocab_size = adapter.vocab_size
        self.max_positions = adapter.max_positions
        self.eos_token_ids = adapter.eos_token_ids
        self._moving = adapter if isinstance(adapter, HasHorizon) else None
        self._text = tuple(text)
        self._rows = range(0)  # whose logits there are
        self._logits = torch.empty(0)

    def new_cache(self, *, batch: int, capacity: int) -> KVCache:
        """Return a cache that holds nothing but a length."""
        return _Length(batch, capacity)

    def forward(self, plans: Sequence[StepPlan], cache: KVCache) -> list[Tensor]:
        """Return the logits [1, V] after the anchor of the one plan, which has no tree."""
        (plan,) = plans
        end = plan.prefix + len(plan.pending)
        assert self._text[plan.prefix : end] == plan.pending, "it is replayed as it was"
        if end - 1 not in self._rows:
            self._compute(end - 1)
        place = end - 1 - self._rows.start
        return [self._logits[place : place + 1]]

    def _compute(self, first: int) -> None:
        """Compute the logits after a token of the text, and of as many more as there is room."""
        rows = range(first, min(len(self._text), first + max(1, LARGEST // self.vocab_size)))
        # What is beyond the horizon of a short text would change the rows before it.
        limit = None if self._moving is None else self._moving.horizon(first + 1)
        if limit is not None and first < limit:
            rows = range(first, min(rows.stop, limit))
        try:
            self._logits = plain_logits(self.model, self._text[: rows.stop], rows)
        except Exception as error:
            tokens = f"{rows.stop} tokens"
            reason = f"the model's own forward pass over {tokens} fails: {shortened(error)}"
            raise _ForwardError(reason) from error
        self._rows = rows


class _Length:
    """The cache of a model that needs none."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths: tuple[int, ...] = (0,) * batch

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = tuple(
            length + len(keep) for length, keep in zip(self.lengths, rows, strict=True)
        )

    def keep(self, sequences: Sequence[int]) -> None:
        self.lengths = tuple(self.lengths[old] for old in sequences)

    def reset(self) -> None:
        self.lengths = (0,) * len(self.lengths)
