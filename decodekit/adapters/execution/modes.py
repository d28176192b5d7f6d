"""The ways of execution by name."""

from __future__ import annotations

from decodekit.adapters.execution.graphs import check_graphs
from decodekit.errors import (
    ConfigError,
    nearest,
)

__all__ = ["EXECUTIONS", "check_execution"]

EXECUTIONS = ("auto", "eager", "packed", "native", "compiled", "graphs")


def check_execution(mode: str) -> None:
    """Check the name of a way of execution, and that this machine has what it needs.

    Raises:
        ConfigError: There is none of that name, or it needs a GPU.
    """
    if mode not in EXECUTIONS:
        raise ConfigError(
            f"unknown execution {mode!r}: {nearest(str(mode), EXECUTIONS)}",
            key="execution",
            value=mode,
        )
    if mode == "graphs":
        check_graphs()
