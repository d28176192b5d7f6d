"""The attention mask of one decoding step, and how it is lowered to tensors.

A ``TreeMask`` says *what* each row sees; a backend says *how* a kernel is told. The rows of a step
are the tail of the sequence: first the pending committed tokens, a chain, then the tree's nodes.

Shapes: R rows, P prefix, S = P + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decodekit.errors import BackendError

__all__ = ["TreeMask", "bool_to_additive", "pad_masks"]


@dataclass(frozen=True, slots=True)
class TreeMask:
    """What each of R tail rows sees among P prefix positions and the R tail rows themselves.

    Every row sees the whole prefix. Row ``q`` sees tail row ``s`` if and only if
    ``tin[s] <= tin[q] < tout[s]``: ``s`` is ``q`` or an ancestor of ``q``. A sliding window hides
    what lies ``window`` or more positions back, by *logical* position: rows of a tree share
    positions, so their place in memory says nothing.

    Attributes:
        prefix: P, the number of committed rows in the cache; their positions are 0 .. P-1.
        tin: The entry time of each row in a depth-first walk of the tail, length R.
        tout: The time just after the last descendant of each row, length R.
        positions: The logical position of each row, length R.
        lead: How many of the first rows are known to be committed tokens, a chain.
    """

    prefix: int
    tin: tuple[int, ...]
    tout: tuple[int, ...]
    positions: tuple[int, ...]
    lead: int = 0

    @property
    def rows(self) -> int:
        """R, the number of rows of the step."""
        return len(self.tin)

    @property
    def is_causal(self) -> bool:
        """Whether the tail is one chain, so that a kernel's own causal mask says the same."""
        rows = self.rows
        return self.tin == tuple(range(rows)) and all(end == rows for end in self.tout)

    def sees(self, row: int, key: int, *, window: int | None = None) -> bool:
        """Return whether ``row`` sees ``key``, a place in 0 .. S-1: the definition, one at a time.

        The lowerings below must agree with it; tests compare them.
        """
        if key < self.prefix:
            position = key
        else:
            tail = key - self.prefix
            if not self.tin[tail] <= self.tin[row] < self.tout[tail]:
                return False
            position = self.positions[tail]
        return window is None or self.positions[row] - position < window

    def to_bool(self, *, window: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the mask as a boolean tensor [R, S], True where a row sees a key.

        Args:
            window: The sliding window's length in positions, the row's own included; None for
                full attention.
            device: Where the mask is made.
        """
        # One small host array and one copy to the device, whatever the length of the prefix.
        times = torch.tensor([self.tin, self.tout, self.positions], device=device)
        tin, tout, positions = times.unbind(0)
        tail = (tin <= tin[:, None]) & (tin[:, None] < tout)
        mask = torch.ones((self.rows, self.prefix + self.rows), dtype=torch.bool, device=device)
        mask[:, self.prefix :] = tail
        if window is not None:
            keys = torch.cat([torch.arange(self.prefix, device=device), positions])
            mask &= keys > positions[:, None] - window  # no R x S numbers in between
        return mask

    def to_additive(
        self,
        dtype: torch.dtype,
        *,
        window: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return the mask as a tensor [R, S] to be added to scores: 0 where seen, else -inf.

        Every row sees itself, so no row of a softmax over it is empty.
        """
        return bool_to_additive(self.to_bool(window=window, device=device), dtype)


def bool_to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask of any shape into one to be added to scores: 0 where True, else -inf.

    Raises:
        BackendError: ``mask`` is not boolean; adding it as it is would hide nothing.
    """
    if mask.dtype != torch.bool:
        raise BackendError(f"expected a boolean mask, not one of {mask.dtype}")
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, float("-inf")
    )


def pad_masks(
    masks: list[TreeMask], *, window: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the masks of B sequences as one boolean tensor [B, R, S], padded to the widest.

    The keys of sequence ``b`` are places 0 .. S_b-1 of its own cache slot. Rows added as padding
    see place 0 only, so that no row is empty; their results are thrown away.
    """
    if len(masks) == 1:
        return masks[0].to_bool(window=window, device=device)[None]
    rows = max(mask.rows for mask in masks)
    keys = max(mask.prefix + mask.rows for mask in masks)
    padded = torch.zeros((len(masks), rows, keys), dtype=torch.bool, device=device)
    for index, mask in enumerate(masks):
        padded[index, : mask.rows, : mask.prefix + mask.rows] = mask.to_bool(
            window=window, device=device
        )
        padded[index, mask.rows :, 0] = True
    return padded
