"""Whether a model is still what a forward pass was laid out from."""

from __future__ import annotations

from itertools import repeat
from operator import is_
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["Snapshot"]


class Snapshot:
    """What a model is made of, all of it, since any part may be exchanged alone.

    A LoRA that is merged into one kind of layer, a weight that is assigned through ``.data``: the
    first layer would not tell. It is compared at every pass, so without a loop in Python: less than
    0.1 ms for 30 layers.

    Args:
        model: Of the LLaMA family.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        places = [
            (held, name)
            for module in model.modules()
            for held in (module._modules, module._parameters, module._buffers)
            for name in held
        ]
        self._held: list[dict[str, Any]] = [held for held, _ in places]
        self._names = [name for _, name in places]
        self._things = [held[name] for held, name in places]
        self._tensors = [thing for thing in self._things if isinstance(thing, Tensor)]
        self._hooks = [
            hooks
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._attributes = [vars(module) for module in model.modules()]
        self._state = self._state_of(model)

    def is_of(self, model: PreTrainedModel) -> bool:
        """Return whether nothing was replaced, moved, cast, packed, hooked or patched."""
        things = map(dict.get, self._held, self._names)
        return all(map(is_, things, self._things)) and self._state == self._state_of(model)

    def _state_of(self, model: PreTrainedModel) -> tuple[object, ...]:
        config = model.config
        return (
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(len, self._hooks)),
            any(map(dict.__contains__, self._attributes, repeat("forward"))),
            config.num_hidden_layers,
            getattr(config, "sliding_window", None),
        )
