"""Passes of the ``llama`` adapter in fixed shapes over a cache that stays where it is.

Shapes: b sequences, R rows, S keys, both rounded up, N = b * R, H query heads, K kv heads,
D head dim, C rows of the cache in memory, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decodekit.adapters.execution.graphs import Capture, rounded_keys
from decodekit.adapters.execution.sizes import rounded_rows
from decodekit.adapters.llama.cache import LlamaCache
from decodekit.adapters.llama.forward import LeanForward
from decodekit.adapters.llama.weights import LayerWeights
from decodekit.adapters.rows import padded_rows
from decodekit.interfaces.mask import TreeMask, pad_masks
from decodekit.interfaces.plan import StepPlan

__all__ = ["StaticPass", "run_recorded"]


def run_recorded(
    lean: LeanForward,
    plans: Sequence[StepPlan],
    masks: Sequence[TreeMask],
    cache: LlamaCache,
    capture: Capture,
) -> Tensor | None:
    """Return the logits [b, R, V] of all rows of a pass, from a recording of its shape.

    The rows beyond a plan's own mean nothing, and neither they nor what they leave in the cache are
    ever looked at. The next pass overwrites the result.

    Args:
        lean: The layers.
        plans: Of b sequences.
        masks: Theirs.
        cache: Made ready by ``begin``, with one spare row.
        capture: Records and replays.

    Returns:
        None where a plan has more rows than are recorded; nothing was done then.
    """
    rows = rounded_rows(max(plan.rows for plan in plans))
    if rows is None:
        return None
    end = max(plan.prefix + plan.rows for plan in plans)
    keys = rounded_keys(end, cache.memory_rows)
    recorded: StaticPass = cache.recordings.get(
        lean,
        (len(plans), rows, keys),
        lambda: StaticPass(lean, cache, batch=len(plans), rows=rows, keys=keys),
    )
    recorded.load(plans, masks)
    return recorded.run(capture)


class StaticPass:
    """One shape of pass: tensors that keep their place, and what runs over them.

    Args:
        lean: The layers.
        cache: Where keys and values lie; its last row in memory takes what nobody reads.
        batch: b.
        rows: R.
        keys: S, at most C.
    """

    def __init__(
        self, lean: LeanForward, cache: LlamaCache, *, batch: int, rows: int, keys: int
    ) -> None:
        device = cache.device
        self._lean = lean
        # Not the cache itself: it holds this object, and its memory must go when it goes.
        self._places_in = [
            tuple(states[:batch] for states in cache.rows(index)) for index in range(cache.layers)
        ]
        self._spare = cache.memory_rows - 1
        self._keys = keys
        self._numbers = torch.zeros((3, batch, rows), dtype=torch.long, device=device)
        self._sequence = torch.arange(batch, device=device)[:, None]
        cos, sin = lean.cosines(self._numbers[1], end=1)
        self._cos, self._sin = cos.clone(), sin.clone()
        self._masks = {
            window: torch.zeros((batch, 1, rows, keys), dtype=cache.dtype, device=device)
            for window in lean.windows
        }
        self._replay: Callable[[], Tensor] | None = None  # what ``capture`` makes of the first run

    def load(self, plans: Sequence[StepPlan], masks: Sequence[TreeMask]) -> None:
        """Copy the plans of b sequences and their masks to where the pass looks for them."""
        rows = self._numbers.shape[2]
        width = max(plan.rows for plan in plans)
        tokens, positions = padded_rows(plans)
        places = [
            [*range(plan.prefix, plan.prefix + plan.rows), *[self._spare] * (rows - plan.rows)]
            for plan in plans
        ]
        wide = [
            [[*row, *row[-1:] * (rows - width)] for row in part] for part in (tokens, positions)
        ]
        self._numbers.copy_(torch.tensor([*wide, places]))
        end = 1 + max(max(row) for row in positions)
        cos, sin = self._lean.cosines(self._numbers[1], end=end)
        self._cos.copy_(cos)
        self._sin.copy_(sin)
        for window, mask in self._masks.items():
            visible = pad_masks(list(masks), window=window, device=mask.device)
            mask.fill_(float("-inf"))
            mask[:, 0, width:, 0] = 0.0  # so that no row sees nothing
            mask[:, 0, :width, : visible.shape[2]].masked_fill_(visible, 0.0)

    def run(self, capture: Capture) -> Tensor:
        """Return the logits [b, R, V] of what was loaded; recorded at the first call."""
        if self._replay is None:
            self._replay = capture(self._logits)
        return self._replay()

    def _logits(self) -> Tensor:
        _, batch, rows = self._numbers.shape
        logits = self._lean.run_static(
            self._numbers[0].flatten(), self._cos, self._sin, self._attend
        )
        return logits.view(batch, rows, -1)

    def _attend(self, index: int, layer: LayerWeights, turned: Tensor, value: Tensor) -> Tensor:
        _, batch, rows = self._numbers.shape
        turned, value = (x.view(batch, rows, *x.shape[1:]) for x in (turned, value))
        all_keys, all_values = self._places_in[index]
        where = (self._sequence, self._numbers[2])
        all_keys.transpose(1, 2).index_put_(where, turned[:, :, layer.heads :])
        all_values.transpose(1, 2).index_put_(where, value)
        output_BHRD = scaled_dot_product_attention(
            turned[:, :, : layer.heads].transpose(1, 2),
            all_keys[:, :, : self._keys],
            all_values[:, :, : self._keys],
            attn_mask=self._masks[layer.window],
            scale=layer.scale,
            enable_gqa=layer.heads != layer.kv_heads,
        )
        return output_BHRD.transpose(1, 2).reshape(batch * rows, -1)
