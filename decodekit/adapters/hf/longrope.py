"""LongRoPE (Ding et al., 2024, arXiv 2402.13753): other frequencies for short and for long texts.

``transformers`` takes the long set as soon as a pass holds a position beyond the model's original
length, whoever's position that is, and computes all keys anew when a text grows beyond it. So a row
sees keys of the set that belongs to its own position. Guesses must not reach over the border from
before it, and keys are computed anew once when a text has passed it; a batch may hold texts on both
sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decodekit.adapters.hf.attention import NoStepError
from decodekit.adapters.model_lock import lock_of

__all__ = ["LongRope"]


class LongRope:
    """The rotary embeddings of a model with LongRoPE.

    Args:
        model: The model.

    Attributes:
        border: Positions of a short text; a row at this position or beyond is of a long one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
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
        """Let the model rotate, inside the block, each of B sequences as a long text or not.

        One thread at a time per model: the blocks of two would mix up whose texts are long.
        """
        with lock_of(self._model):
            own = [vars(module).get("forward") for module in self._modules]
            for module in self._modules:
                module.forward = _Rotation(module.forward, self.border, long)
            try:
                yield
            finally:
                for module, before in zip(self._modules, own, strict=True):
                    del module.forward
                    if before is not None:  # a hook's, for instance of accelerate
                        module.forward = before


class _Rotation:
    """What a rotary module does for a pass over texts of both kinds.

    The module itself is asked once for each kind, with positions of which the longest is of that
    kind. So nothing is known here of what it takes from which kind.

    Args:
        forward: The module's own.
        border: Positions of a short text.
        long: For each of B sequences, whether it is a long text.
    """

    def __init__(self, forward: Callable[..., Any], border: int, long: Sequence[bool]) -> None:
        self._forward = forward
        self._border = border
        self._long = long
        self._thread = get_ident()

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [B, R, D] each."""
        if get_ident() != self._thread:
            raise NoStepError
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
        """Return the tables of one kind; those of sequences of the other mean nothing."""
        if not long:
            cos, sin = self._forward(x, position_ids.clamp(max=self._border - 1))
            return cos, sin
        beyond = position_ids.new_full((len(position_ids), 1), self._border)
        cos, sin = self._forward(x, torch.cat([position_ids, beyond], dim=1))
        return cos[:, :-1], sin[:, :-1]
