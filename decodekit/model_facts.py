"""What the configuration of a ``transformers`` model says that decoding has to know."""

from __future__ import annotations

from typing import Any

__all__ = ["eos_token_ids_of", "max_positions_of"]


def max_positions_of(model: Any) -> int | None:
    """Return the positions that a model was made for; None if its configuration names no limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return int(limit) if limit else None


def eos_token_ids_of(model: Any) -> frozenset[int]:
    """Return the tokens that end a text: all of the generation config, else the model config's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
