"""Threads that stay where they are: without that, a time on a CPU may be any number.

torch's threads wait for each other at every operator. One that the system has moved, or that shares
its core with something else, makes all of them wait. OpenMP pins them, but only if it is told so in
the environment before torch is loaded; so a program that has come that far starts itself anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

__all__ = ["one_cpu_per_core", "pinning", "restart_pinned"]

_TOPOLOGY = Path("/sys/devices/system/cpu")


def pinning(environment: Mapping[str, str], cpus: Collection[int]) -> dict[str, str]:
    """Return the variables that pin one thread to each of ``cpus``.

    Args:
        environment: What is set already. Whoever has set an ``OMP_`` variable has decided
            otherwise: nothing is added.
        cpus: One for each thread.
    """
    if not cpus or any(name.startswith("OMP_") for name in environment):
        return {}
    return {
        "OMP_PROC_BIND": "close",
        "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in sorted(cpus)),
        "OMP_NUM_THREADS": str(len(cpus)),
    }


def one_cpu_per_core(cpus: Collection[int], *, topology: Path = _TOPOLOGY) -> list[int]:
    """Return the first of ``cpus`` on each physical core, ascending.

    Two hardware threads of a core share its arithmetic, so a second one only gets in the way.

    Args:
        cpus: Those that the process may use.
        topology: Where Linux describes the cores; a CPU that it says nothing about is one.
    """
    chosen: dict[str, int] = {}
    for cpu in sorted(cpus):
        try:
            core = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            core = f"cpu{cpu}"
        chosen.setdefault(core, cpu)
    return sorted(chosen.values())


def restart_pinned() -> None:
    """Start this program anew with its threads pinned; return if they are, or cannot be.

    It is the same process with the same arguments, so signals and pipes are as they were. To be
    called by a program's own command line only, before it has read or written anything.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    if affinity is None or not sys.executable:
        return
    added = pinning(os.environ, one_cpu_per_core(affinity(0)))
    if added:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.argv, which has lost "-m module" and the interpreter's own options.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added})
