"""Conformance suites for what a plugin brings, to be called from the plugin's own tests.

Each ``check_*`` runs a component through the laws of its interface and raises ``AssertionError``
with the law that is broken and the input that breaks it. Nothing here needs pytest.
"""

from __future__ import annotations

from decodekit.testing.adapter import check_adapter
from decodekit.testing.backend import check_backend
from decodekit.testing.pool import check_pool
from decodekit.testing.proposer import check_proposer
from decodekit.testing.toy import ToyAdapter
from decodekit.testing.verifier import check_verifier

__all__ = [
    "ToyAdapter",
    "check_adapter",
    "check_backend",
    "check_pool",
    "check_proposer",
    "check_verifier",
]
