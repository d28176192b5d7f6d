"""Every lowering of a mask says what the definition says."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from decodekit.interfaces.mask import TreeMask, pad_masks
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT
from tests.property.strategies import plans, windows


def slow(mask: TreeMask, window: int | None) -> torch.Tensor:
    keys = mask.prefix + mask.rows
    return torch.tensor(
        [[mask.sees(row, key, window=window) for key in range(keys)] for row in range(mask.rows)]
    )


@given(plans(), windows)
def test_the_definition_is_the_path_and_the_window(plan: StepPlan, window: int | None) -> None:
    """``sees`` against paths that are walked from the parents, without intervals."""
    mask = plan.mask()
    lead, anchor = len(plan.pending), plan.anchor_row
    for row in range(plan.rows):
        path = set(range(min(row, anchor) + 1))
        node = row - lead
        while row > anchor and node != ROOT:
            path.add(lead + node)
            node = plan.tree.parents[node]
        for key in range(plan.prefix + plan.rows):
            tail = key - plan.prefix
            position = key if tail < 0 else plan.positions[tail]
            visible = tail < 0 or tail in path
            near = window is None or plan.positions[row] - position < window
            assert mask.sees(row, key, window=window) is (visible and near)


@given(plans(), windows)
def test_the_boolean_and_the_additive_form_agree_with_the_definition(
    plan: StepPlan, window: int | None
) -> None:
    mask = plan.mask()
    expected = slow(mask, window)
    assert torch.equal(mask.to_bool(window=window), expected)
    added = mask.to_additive(torch.float32, window=window)
    assert torch.equal(added, torch.where(expected, 0.0, -torch.inf))


@given(plans(), windows)
def test_every_row_sees_itself_and_nothing_later(plan: StepPlan, window: int | None) -> None:
    tail = plan.mask().to_bool(window=window)[:, plan.prefix :]
    assert bool(tail.diagonal().all())
    assert not bool(tail.triu(1).any())


@given(plans())
def test_causal_means_that_the_tail_is_a_full_triangle(plan: StepPlan) -> None:
    mask = plan.mask()
    triangle = torch.ones((mask.rows, mask.rows), dtype=torch.bool).tril()
    assert mask.is_causal is torch.equal(mask.to_bool()[:, mask.prefix :], triangle)


@given(st.lists(plans(max_nodes=6, max_prefix=6), min_size=1, max_size=4), windows)
def test_a_padded_batch_holds_each_mask_and_no_empty_row(
    batch: list[StepPlan], window: int | None
) -> None:
    masks = [plan.mask() for plan in batch]
    padded = pad_masks(masks, window=window)
    rows = max(mask.rows for mask in masks)
    keys = max(mask.prefix + mask.rows for mask in masks)
    assert padded.shape == (len(masks), rows, keys)
    assert bool(padded.any(dim=-1).all())
    for mask, filled in zip(masks, padded, strict=True):
        keys = mask.prefix + mask.rows
        assert torch.equal(filled[: mask.rows, :keys], slow(mask, window))
        assert not bool(filled[: mask.rows, keys:].any())


@given(plans())
def test_positions_grow_by_one_along_every_path(plan: StepPlan) -> None:
    mask = plan.mask()
    for row in range(plan.rows):
        seen = [key for key in range(plan.prefix + plan.rows) if mask.sees(row, key)]
        at = [key if key < plan.prefix else plan.positions[key - plan.prefix] for key in seen]
        assert sorted(at) == list(range(plan.positions[row] + 1))
