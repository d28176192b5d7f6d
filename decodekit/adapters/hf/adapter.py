"""Token trees on ``transformers`` causal language models."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decodekit.adapters.hf.attention import StepAttention, attention_of
from decodekit.adapters.hf.cache import HFCache
from decodekit.adapters.hf.support import check_support
from decodekit.errors import GenerationError
from decodekit.interfaces import AttentionBackend, KVCache
from decodekit.plan import StepPlan

__all__ = ["HFAdapter"]


class HFAdapter:
    """Runs steps on a loaded model; the model itself is left as it was.

    Args:
        model: A decoder-only model with a language-modelling head, in evaluation mode.
        backend: The attention kernel.

    Raises:
        ModelSupportError: The model cannot be decoded exactly, with the reason.
        BackendError: The backend does not support what the model asks of attention.
    """

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend) -> None:
        check_support(model)
        self.model = model
        self.backend = backend
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        # One token through all layers: what a backend refuses, it refuses now, not in mid-text.
        self.forward([StepPlan(prefix=0, pending=(0,))], self.new_cache(batch=1, capacity=1))

    @property
    def vocab_size(self) -> int:
        """V, the number of logits of a row."""
        return int(self.model.config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Positions that the model was made for, or None if its configuration names no limit."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text: all of the generation config, else the model config's."""
        for config in (getattr(self.model, "generation_config", None), self.model.config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    def new_cache(self, *, batch: int, capacity: int) -> HFCache:
        """Return an empty cache for ``batch`` sequences of at most ``capacity`` rows each."""
        layers = int(self.model.config.num_hidden_layers)
        key_rows = getattr(self.backend, "key_rows", None)
        return HFCache(layers=layers, batch=batch, capacity=capacity, key_rows=key_rows)

    @torch.inference_mode()
    def forward(self, plans: Sequence[StepPlan], cache: KVCache) -> list[Tensor]:
        """Run one step of B sequences in one pass; see ``ModelAdapter.forward``."""
        if not isinstance(cache, HFCache):
            raise GenerationError(f"the 'hf' adapter cannot use a {type(cache).__name__}")
        if tuple(plan.prefix for plan in plans) != cache.lengths:
            raise GenerationError(
                f"plans for prefixes {[plan.prefix for plan in plans]} do not fit a cache that "
                f"holds {list(cache.lengths)} rows"
            )
        rows = max(plan.rows for plan in plans)
        cache.begin([plan.rows for plan in plans])
        device = self.device
        tokens = [_padded(plan.tokens, rows) for plan in plans]
        positions = [_padded(plan.positions, rows) for plan in plans]
        # The head runs on the rows after which a token is needed: the anchor's and the nodes'.
        wanted = sorted({row for plan in plans for row in range(plan.anchor_row, plan.rows)})
        place = {row: index for index, row in enumerate(wanted)}
        tail = wanted == list(range(rows - len(wanted), rows))
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(tokens, device=device),
            "position_ids": torch.tensor(positions, device=device),
            # A 4-D mask is passed through untouched, which saves building one; the real one is in
            # the step. It is empty, so that a layer that used it would fail and not see too much.
            "attention_mask": torch.ones((1, 1, 0, 0), device=device),
            "decodekit_step": StepAttention(self.backend, [plan.mask() for plan in plans]),
            "logits_to_keep": len(wanted) if tail else torch.tensor(wanted, device=device),
            "use_cache": True,
            self._cache_argument: cache,
        }
        with attention_of(self.model):
            logits: Tensor = self.model(**inputs).logits
        # The rows of one sequence follow each other in what was kept.
        return [
            logits[index, place[plan.anchor_row] : place[plan.rows - 1] + 1]
            for index, plan in enumerate(plans)
        ]


def _padded(values: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return ``values`` with the last repeated up to ``length``: a valid token or position."""
    return values + values[-1:] * (length - len(values))
