"""How rows attend: the protocols of an attention backend.

Shapes: B batch, H query heads, K kv heads, D head dim, R rows, P prefix, S = P + R.
"""

from __future__ import annotations

from decodekit.interfaces.strategy import AttentionBackend, MaskBuilder

__all__ = ["AttentionBackend", "MaskBuilder"]
