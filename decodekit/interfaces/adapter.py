"""How a model runs a step: the protocols of an adapter and of its cache.

Shapes: B batch, K kv heads, D head dim, R rows, P prefix, T nodes, V vocabulary.
"""

from __future__ import annotations

from decodekit.interfaces.strategy import (
    Compilation,
    HasArgmax,
    HasExecution,
    HasHorizon,
    HasPositionLimit,
    HasRepeat,
    KVCache,
    ModelAdapter,
)

__all__ = [
    "Compilation",
    "HasArgmax",
    "HasExecution",
    "HasHorizon",
    "HasPositionLimit",
    "HasRepeat",
    "KVCache",
    "ModelAdapter",
]
