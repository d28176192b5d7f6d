"""What a model's forward pass is given, and which of its logits come back.

Models differ in what they name and in what they ignore: a forward with ``**kwargs`` takes anything
and may do nothing with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decodekit.adapters.hf.cache import HFCache
from decodekit.adapters.plain_forward import declares, logits_of, takes
from decodekit.errors import ModelSupportError

__all__ = ["ForwardArguments"]

_KEEP = "logits_to_keep"


class ForwardArguments:
    """The keyword arguments of one model's forward.

    Args:
        model: The model.

    Attributes:
        takes_more: Whether it takes arguments that it does not name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._name = type(model).__name__
        self._cache = _name_of_the_cache(model)
        self.takes_more = takes(model, "decodekit_step")
        self._others = [name for name in ("position_ids", "use_cache") if takes(model, name)]
        self._declared = declares(model, _KEEP)
        self._keeps = self._declared or takes(model, _KEEP)

    def of(
        self, tokens: Tensor, positions: Tensor, *, cache: HFCache, wanted: Sequence[int]
    ) -> dict[str, Any]:
        """Return the arguments of a pass, all but those of attention.

        Args:
            tokens: Ids [B, R].
            positions: [B, R].
            cache: Made ready for the pass.
            wanted: The rows whose logits are needed, ascending.
        """
        values = {"position_ids": positions, "use_cache": True}
        inputs: dict[str, Any] = {"input_ids": tokens, self._cache: cache}
        inputs |= {name: values[name] for name in self._others}
        if self._keeps:
            inputs[_KEEP] = self._kept_rows(tokens, wanted)
        return inputs

    def kept(self, output: Any, *, rows: int, wanted: Sequence[int]) -> Tensor:
        """Return the logits of the wanted rows, [B, len(wanted), V], from what a pass returned.

        Raises:
            ModelSupportError: The model returned other rows than it was asked for.
        """
        logits = logits_of(output)
        first = wanted[0]
        if logits.shape[1] == len(wanted) and (self._keeps or len(wanted) == rows):
            return logits
        if logits.shape[1] == rows:
            return logits[:, torch.tensor(wanted, device=logits.device)]
        if self._keeps and logits.shape[1] == rows - first:
            return logits[:, torch.tensor([row - first for row in wanted], device=logits.device)]
        reason = (
            f"its forward returned logits of {logits.shape[1]} rows where {len(wanted)} of {rows} "
            "were asked for"
        )
        raise ModelSupportError(
            f"{self._name} cannot be decoded by the 'hf' adapter: {reason}", reason=reason
        )

    def _kept_rows(self, tokens: Tensor, wanted: Sequence[int]) -> int | Tensor:
        rows = tokens.shape[1]
        tail = rows - wanted[0]
        # Rows by number are transformers' own convention; the last so many are older.
        if tail == len(wanted) or not self._declared:
            return tail
        return torch.tensor(list(wanted), device=tokens.device)


def _name_of_the_cache(model: PreTrainedModel) -> str:
    """Return what the forward calls its cache; where it does not say, what its layers call it."""
    for forward in (model, getattr(model, "base_model", model)):
        for name in ("cache", "past_key_values"):
            if declares(forward, name):
                return name
    return "past_key_values"
