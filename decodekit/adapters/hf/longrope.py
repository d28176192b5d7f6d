"""LongRoPE (Ding et al., 2024, arXiv 2402.13753): other frequencies for short and for long texts.

``transformers`` takes the long set as soon as a pass holds a position beyond the model's original
length, whoever's position that is, and computes all keys anew when a text grows beyond it. So a row
sees keys of the set that belongs to its own position. Guesses must not reach over the border from
before it, and keys are computed anew once when a text has passed it; a batch may hold texts on both
sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["LongRope"]


class LongRope:
    """The rotary embeddings of a model with LongRoPE.

    Args:
        model: The model.

    Attributes:
        border: Positions of a short text; a row at this position or beyond is of a long one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = [
            module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"
        ]
        parameters = model.config.rope_parameters
        self.border = int(parameters["original_max_position_embeddings"])

    @staticmethod
    def of(model: PreTrainedModel) -> LongRope | None:
        """Return the LongRoPE of a model; None if it has none."""
        parameters: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
        return LongRope(model) if parameters.get("rope_type") == "longrope" else None

    @contextmanager
    def of_lengths(self, long: Sequence[bool]) -> Iterator[None]:
        """Let the model rotate, inside the block, each of B sequences as a long text or not."""
        for module in self._modules:
            module.forward = _Rotation(module, self.border, long)
        try:
            yield
        finally:
            for module in self._modules:
                del module.forward


class _Rotation:
    """What a rotary module does for a pass over texts of both kinds."""

    def __init__(self, module: torch.nn.Module, border: int, long: Sequence[bool]) -> None:
        self._module = module
        self._border = border
        self._long = long

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [B, R, D] each."""
        tables = {kind: self._rotate(x, position_ids, kind) for kind in set(self._long)}
        if len(tables) == 1:
            return tables.popitem()[1]
        long = torch.tensor(self._long, device=x.device)[:, None, None]
        cos, sin = (
            torch.where(long, one, other)
            for one, other in zip(tables[True], tables[False], strict=True)
        )
        return cos, sin

    def _rotate(self, x: Tensor, position_ids: Tensor, long: bool) -> tuple[Tensor, Tensor]:
        module: Any = self._module
        plain = type(module).forward.__wrapped__  # without the choice by the longest position
        before = module.inv_freq
        module.inv_freq = self._frequencies(before.device, long)
        try:
            cos, sin = plain(module, x, position_ids)
        finally:
            module.inv_freq = before
        return cos, sin

    def _frequencies(self, device: torch.device, long: bool) -> Tensor:
        module: Any = self._module
        if not long:
            short: Tensor = module.original_inv_freq.to(device)
            return short
        frequencies: Tensor
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
            module.config, device, seq_len=self._border + 1
        )
        return frequencies
