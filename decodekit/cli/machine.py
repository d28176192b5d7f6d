"""What has to be known of the machine to judge a time that was measured on it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

__all__ = ["machine_facts"]


def machine_facts() -> dict[str, Any]:
    """Return the machine, the versions and the threads, as numbers and texts for a JSON file.

    ``openmp`` holds the variables that pin the threads, as this process sees them; a time that was
    taken without them may be any number. ``main_thread_cpus`` is where the first thread may run:
    one CPU, where threads are pinned.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "machine": _processor(),
        "cpus": os.cpu_count(),
        "main_thread_cpus": None if affinity is None else sorted(affinity(0)),
        "threads": torch.get_num_threads(),
        "openmp": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_NUM"))
        },
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("decodekit", "torch", "transformers")},
    }


def _processor() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
