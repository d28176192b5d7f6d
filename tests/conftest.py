"""What all tests share: Hypothesis gives the same run every time."""

from __future__ import annotations

from hypothesis import settings

# No deadline: the first example of a test may pay for an import. No reruns, no randomness: a
# failure in CI is a failure here.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")
