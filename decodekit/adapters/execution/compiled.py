"""``torch.compile`` for code that works row by row: few sizes of it, compiled once each.

The number of rows of a pass is rounded up to one of ``ROWS``, so a text of any length compiles at
most once for each of these. A longer pass, a chunk of a prompt, is bound by its matrix products and
runs as it is.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Any

import torch

from decodekit.adapters.execution.sizes import ROWS, rounded_rows
from decodekit.errors import ConfigError, shortened

__all__ = ["ROWS", "CompiledRows"]

_MOST_CODES = 1024  # torch stops compiling one function anew after 8 times


class CompiledRows:
    """A function of N rows that is compiled for each size in ``ROWS`` when that is first used.

    What was compiled is shared by all objects in this process over the same function.

    Args:
        function: Treats each row by itself, and knows nothing but its arguments.

    Attributes:
        compilations: How often this object had to wait for the compiler.
        seconds: How long, the passes in question included.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.compilations = 0
        self.seconds = 0.0
        self._function = function

    def for_rows(self, rows: int) -> tuple[int, Callable[..., Any]]:
        """Return how many rows have to be added to ``rows``, and the function for that many."""
        size = rounded_rows(rows, ROWS)
        if size is None:
            return 0, self._function
        return size - rows, _compiled(self._function)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Run a pass in this block: counts compilations, and lets torch compile for every size.

        Raises:
            ConfigError: Torch cannot compile the function.
        """
        before, start = _compilations(), time.perf_counter()
        limits = {"recompile_limit": _MOST_CODES, "accumulated_recompile_limit": _MOST_CODES}
        try:
            with torch._dynamo.config.patch(limits):
                yield
        except torch._dynamo.exc.TorchDynamoException as error:
            inner = getattr(error, "inner_exception", error)
            raise ConfigError(
                f"execution=compiled: torch cannot compile this model here ({shortened(inner)}); "
                "use execution=eager",
                key="execution",
                value="compiled",
            ) from error
        finally:
            count = _compilations() - before
            if count:
                self.compilations += count
                self.seconds += time.perf_counter() - start


_counts = local()  # of this thread: another one's compilations are not ours


def _compilations() -> int:
    return getattr(_counts, "compilations", 0)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    inductor = torch._dynamo.lookup_backend("inductor")

    def counting(graph: Any, inputs: Any) -> Any:
        _counts.compilations = _compilations() + 1
        with warnings.catch_warnings():  # of one part of torch about another
            warnings.simplefilter("ignore")
            return inductor(graph, inputs)

    compiled: Callable[..., Any] = torch.compile(
        function, backend=counting, fullgraph=True, dynamic=False
    )
    return compiled
