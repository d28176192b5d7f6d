"""The forward pass of the LLaMA family, with nothing in it that decoding does not need.

Touvron et al., arXiv 2302.13971; grouped queries: Ainslie et al., arXiv 2305.13245.

Shapes: B batch, R rows, E hidden size, H query heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import MistralConfig, PreTrainedModel

from decodekit.adapters.llama.cache import LlamaCache
from decodekit.adapters.llama.rope import RotaryTable, rotate
from decodekit.adapters.llama.snapshot import Snapshot
from decodekit.adapters.llama.weights import LayerWeights, layer_weights, projection
from decodekit.interfaces import AttentionBackend

__all__ = ["LeanForward"]


class LeanForward:
    """The layers of one model, as they are now.

    Args:
        model: Checked by ``support.check_support``. Its weights are shared, see ``layer_weights``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        core = model.model
        self._embedding = core.embed_tokens.weight.detach()
        self._layers = [
            layer_weights(layer, window=_window(model.config, layer.self_attn))
            for layer in core.layers[: model.config.num_hidden_layers]
        ]
        self._norm = core.norm.weight.detach()
        self._epsilon = float(core.norm.variance_epsilon)
        self._head = projection(model.lm_head)
        self._rotary = RotaryTable(
            core.rotary_emb, dtype=self._embedding.dtype, device=self._embedding.device
        )
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._snapshot = Snapshot(model)
        self.windows = frozenset(layer.window for layer in self._layers)
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
        """
        cos, sin = self._rotary.at(positions, end=end)
        hidden = embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            states = self._normed(hidden, layer.attention_norm)
            query, key, value = _heads(layer, states, cos, sin)
            key, value = cache.write(index, key, value)
            output = backend.attend(query, key, value, lowered[layer.window], scale=layer.scale)
            hidden = hidden + layer.out(output.flatten(2))
            states = self._normed(hidden, layer.mlp_norm)
            gate, up = layer.gate_up(states).chunk(2, dim=-1)
            hidden = hidden + layer.down(layer.activation(gate) * up)
        rows = hidden.flatten(0, 1)
        if len(wanted) < len(rows):
            rows = rows[torch.tensor(wanted, device=rows.device)]
        return self._head(self._normed(rows, self._norm))

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm (Zhang and Sennrich, arXiv 1910.07467) of states [..., E].

        In float32 whatever the dtype is, as ``transformers`` does it: to be its equal.
        """
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return weight * wide.to(states.dtype)


def _heads(
    layer: LayerWeights, states: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B, H, R, D], keys and values [B, K, R, D] of normed states [B, R, E]."""
    heads, kv_heads = layer.heads, layer.kv_heads
    all_BRND = layer.qkv(states).view(*states.shape[:2], heads + 2 * kv_heads, -1)
    turned = rotate(all_BRND[:, :, : heads + kv_heads], cos, sin).transpose(1, 2)
    value = all_BRND[:, :, heads + kv_heads :].transpose(1, 2)
    return turned[:, :heads], turned[:, heads:], value


def _window(config: Any, attention: Any) -> int | None:
    """Return a layer's sliding window: Mistral has one for all, Qwen2 one for some."""
    if isinstance(config, MistralConfig):
        return config.sliding_window  # type: ignore[no-any-return]
    return getattr(attention, "sliding_window", None)
