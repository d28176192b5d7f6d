"""The forward pass of the LLaMA family, with nothing in it that decoding does not need.

Touvron et al., arXiv 2302.13971; grouped queries: Ainslie et al., arXiv 2305.13245.

Shapes: B batch, R rows, N = B * R, E hidden size, H query heads, K kv heads, D head dim,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad
from transformers import MistralConfig, PreTrainedModel

from decodekit.adapters.execution.compiled import CompiledRows
from decodekit.adapters.execution.onednn import call_sizes
from decodekit.adapters.llama.cache import LlamaCache
from decodekit.adapters.llama.layer import (
    between_attentions,
    into_attention,
    normed,
    out_of_attention,
)
from decodekit.adapters.llama.rope import RotaryTable
from decodekit.adapters.llama.weights import LayerWeights, layer_weights, project, projection
from decodekit.adapters.snapshot import Snapshot
from decodekit.interfaces.backend import AttentionBackend

__all__ = ["Attend", "LeanForward", "cache_shape"]

Attend: TypeAlias = Callable[[int, LayerWeights, Tensor, Tensor], Tensor]
"""Attention of one layer: its number, its weights, and queries, keys and values [N, ., D], as
``into_attention`` returns them, to outputs [N, H * D]."""


class LeanForward:
    """The layers of one model, as they are now.

    Args:
        model: Checked by ``support.check_support``. Its weights are shared, see ``layer_weights``.

    Attributes:
        embedding: [tokens, E].
        layers: The weights of each layer.
        norm: Weight of the last norm, [E].
        epsilon: Of all norms.
        head: From the hidden size to the vocabulary.
        rotary: Cosines and sines by position.
        dtype: Of all weights.
        device: Theirs.
        cache_shape: L, K and D of keys and values.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        core = model.model
        self.embedding = core.embed_tokens.weight.detach()
        self.layers = [
            layer_weights(layer, window=_window(model.config, layer.self_attn))
            for layer in core.layers[: model.config.num_hidden_layers]
        ]
        self.norm = core.norm.weight.detach()
        self.epsilon = float(core.norm.variance_epsilon)
        self.head = projection(model.lm_head)
        self.rotary = RotaryTable(
            core.rotary_emb, dtype=self.embedding.dtype, device=self.embedding.device
        )
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.cache_shape = cache_shape(model)
        self._snapshot = Snapshot(model)
        self.windows = frozenset(layer.window for layer in self.layers)
        """The sliding windows of all layers, None for full attention."""

    def is_of(self, model: PreTrainedModel) -> bool:
        """Return whether ``model`` still has these weights; see ``Snapshot``."""
        return self._snapshot.is_of(model)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        end: int,
        wanted: Sequence[int],
        cache: LlamaCache,
        backend: AttentionBackend,
        lowered: Mapping[int | None, Any],
        between: CompiledRows | None = None,
    ) -> Tensor:
        """Return the logits [len(wanted), V] of the wanted rows.

        Args:
            tokens: Ids [B, R].
            positions: [B, R].
            end: More than any position.
            wanted: Places in the B * R rows, sequence after sequence.
            cache: Made ready by ``begin``; the rows' keys and values are written to it.
            backend: The attention kernel.
            lowered: The step's masks by window, as ``backend.lower`` returned them.
            between: ``layer.between_attentions``, compiled; None runs it as it is.
        """
        batch, rows = tokens.shape

        def attend(index: int, layer: LayerWeights, turned: Tensor, value: Tensor) -> Tensor:
            query, key, value = _heads(layer, turned, value, batch=batch, rows=rows)
            key, value = cache.write(index, key, value)
            output = backend.attend(query, key, value, lowered[layer.window], scale=layer.scale)
            return output.reshape(batch * rows, -1)

        cos, sin = self.cosines(positions, end=end)
        hidden = self._through(tokens.flatten(), cos, sin, attend, between)
        if len(wanted) < len(hidden):
            hidden = hidden[torch.tensor(wanted, device=hidden.device)]
        return self._logits(hidden)

    def cosines(self, positions: Tensor, *, end: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for positions [B, R] below ``end``, both [B * R, 1, D]."""
        cos, sin = self.rotary.at(positions, end=end)
        return cos.flatten(0, 1), sin.flatten(0, 1)

    def run_static(
        self,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Return the logits [N, V] of all rows, from tensors alone: nothing is read on the host.

        Args:
            tokens: Ids [N].
            cos: [N, 1, D], of ``cosines``.
            sin: Likewise.
            attend: Attention of one layer.
        """
        return self._logits(self._through(tokens, cos, sin, attend, None))

    def _through(
        self,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        between: CompiledRows | None,
    ) -> Tensor:
        """Return what comes out of the last layer, [N, E]."""
        layers, epsilon = self.layers, self.epsilon
        hidden = embedding(tokens, self.embedding)
        turned, value = into_attention(layers[0], hidden, cos, sin, epsilon)
        count = len(hidden)
        padding, step = self._rows_to_fill_up(count), between_attentions
        if between is not None:
            padding, step = between.for_rows(count)
        pads = padding > 0 or between is not None
        if pads:
            # Rows that pad go through matrix products only, never into attention or the cache.
            hidden, cos, sin = (_padded(states, padding) for states in (hidden, cos, sin))
        for index, (layer, following) in enumerate(pairwise(layers)):
            if padding:
                turned, value = turned[:count], value[:count]
            output = attend(index, layer, turned, value)
            output = _padded(output, padding) if pads else output
            hidden, turned, value = step(layer, following, hidden, output, cos, sin, epsilon)
        output = attend(len(layers) - 1, layers[-1], turned[:count], value[:count])
        return out_of_attention(layers[-1], hidden[:count], output, epsilon)

    def _rows_to_fill_up(self, rows: int) -> int:
        """Return how many rows packed layers add: done here, it is done once for most of them."""
        first = self.layers[0].qkv[0]
        if not first.packed:
            return 0
        return sum(call_sizes(first.weight, first.bias, rows=rows).calls(rows)) - rows

    def _logits(self, hidden: Tensor) -> Tensor:
        return project(self.head, normed(hidden, self.norm, self.epsilon))


def cache_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return L, K and D, the sizes of a model's keys and values."""
    attention = model.model.layers[0].self_attn
    dim = int(attention.head_dim)
    return int(model.config.num_hidden_layers), attention.k_proj.out_features // dim, dim


def _padded(states: Tensor, rows: int) -> Tensor:
    """Return ``states`` [N, ...] with so many rows of zeros behind them, contiguous.

    Other strides, even those of a dimension of size 1, would be compiled for anew.
    """
    if rows:
        return pad(states, (0, 0) * (states.ndim - 1) + (0, rows))
    return states.reshape(-1).view(states.shape)


def _heads(
    layer: LayerWeights, turned: Tensor, value: Tensor, *, batch: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B, H, R, D], keys and values [B, K, R, D] of ``into_attention``'s."""
    turned = turned.view(batch, rows, *turned.shape[1:]).transpose(1, 2)
    value = value.view(batch, rows, *value.shape[1:]).transpose(1, 2)
    return turned[:, : layer.heads], turned[:, layer.heads :], value


def _window(config: Any, attention: Any) -> int | None:
    """Return a layer's sliding window: Mistral has one for all, Qwen2 one for some."""
    if isinstance(config, MistralConfig):
        return config.sliding_window  # type: ignore[no-any-return]
    return getattr(attention, "sliding_window", None)
