"""Plans: rows, positions and masks of one step, by example."""

from __future__ import annotations

import pytest

from decodekit.errors import GenerationError
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree

BUSH = TokenTree((7, 8, 9), (ROOT, ROOT, 0))


def test_a_step_with_one_pending_token() -> None:
    plan = StepPlan(5, (3,), BUSH)
    assert plan.rows == 4
    assert plan.anchor_row == 0
    assert plan.tokens == (3, 7, 8, 9)
    assert plan.positions == (5, 6, 6, 7)  # siblings share a position
    assert plan.mask() == TreeMask(
        prefix=5, tin=(0, 1, 3, 2), tout=(4, 3, 4, 3), positions=(5, 6, 6, 7), lead=1
    )


def test_a_step_with_several_pending_tokens() -> None:
    plan = StepPlan(2, (1, 2, 3), BUSH)
    assert plan.rows == 6
    assert plan.anchor_row == 2
    assert plan.tokens == (1, 2, 3, 7, 8, 9)
    assert plan.positions == (2, 3, 4, 5, 5, 6)
    assert plan.mask() == TreeMask(
        prefix=2,
        tin=(0, 1, 2, 3, 5, 4),
        tout=(6, 6, 6, 5, 6, 5),
        positions=(2, 3, 4, 5, 5, 6),
        lead=3,
    )


def test_prefill_is_a_causal_chain() -> None:
    plan = StepPlan(0, (4, 5, 6))
    assert plan.tree == TokenTree()
    assert plan.positions == (0, 1, 2)
    assert plan.anchor_row == 2
    assert plan.mask().is_causal


def test_a_plan_without_an_anchor_is_refused() -> None:
    with pytest.raises(GenerationError, match="at least one pending token"):
        StepPlan(3, ())
