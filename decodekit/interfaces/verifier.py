"""What is accepted of a proposal: the protocol of a verifier."""

from __future__ import annotations

from decodekit.interfaces.strategy import Accepted, Verifier

__all__ = ["Accepted", "Verifier"]
