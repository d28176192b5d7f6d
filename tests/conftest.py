"""What all tests share: a tiny checkpoint, and Hypothesis gives the same run every time."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

collect_ignore = [
    "plugin"
]  # a package of its own: e2e/test_plugin.py installs it and runs its tests

# Triton reads this when it is first imported: without a GPU its kernels run in Python.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: the first example of a test may pay for an import. No reruns, no randomness: a
# failure in CI is a failure here.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a tiny checkpoint, which tests must not change."""
    from tests.support.checkpoint import save_checkpoint  # transformers, which few tests need

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))
