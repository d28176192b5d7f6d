"""``job=profile``: the time of a step by its rows, on this machine, beside what limits it.

``StepTimes.read(path)`` reads a curve that was stored, without loading torch.
"""

from decodekit.cli.profile.step_times import StepTimes

__all__ = ["StepTimes"]
