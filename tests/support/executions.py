"""What tests of the ways of execution share: strategies, requests, and a recorder without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["REQUESTS", "STRATEGIES", "Calls"]

STRATEGIES: dict[str, Any] = {
    "autoregressive": "autoregressive",
    "jacobi": {"name": "jacobi", "window_size": 5},
    "prompt_lookup": "prompt_lookup",
    "lookahead": {"name": "lookahead", "window_size": 4, "ngram_size": 3, "max_candidates": 3},
}

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 5},
    "penalised": {"repetition_penalty": 1.3},
}


class Calls:
    """Stands in for a CUDA graph: a replay calls the pass again.

    As a graph does, it gives its result in the same memory each time.

    Attributes:
        recorded: Passes that were recorded.
        replayed: How often one of them was repeated.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        output = run()

        def replay() -> Tensor:
            self.replayed += 1
            return output.copy_(run())

        return replay
