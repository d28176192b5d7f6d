"""The numbers that are derived from a request's counters."""

from __future__ import annotations

import pytest

from decodekit.decoder.result import GenerationStats


def test_derived_numbers() -> None:
    stats = GenerationStats(
        steps=4,
        tokens=10,
        nodes=24,
        seconds=2.5,
        forward_seconds=2.0,
        time_to_first_token=0.5,
    )
    assert stats.tokens_per_step == 2.5
    assert stats.rows_per_step == 7.0
    assert stats.tokens_per_second == 4.0


def test_nothing_decoded_divides_by_nothing() -> None:
    stats = GenerationStats(
        steps=0, tokens=0, nodes=0, seconds=0.0, forward_seconds=0.0, time_to_first_token=0.0
    )
    assert (stats.tokens_per_step, stats.rows_per_step, stats.tokens_per_second) == (0, 0, 0)


def test_stats_are_named_and_frozen() -> None:
    with pytest.raises(TypeError):
        GenerationStats(1, 2, 3, 4.0, 5.0, 6.0)  # type: ignore[misc]
