"""Masks by hand-made examples; ``tests/property/test_mask_laws.py`` compares the lowerings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decodekit.errors import BackendError
from decodekit.interfaces.mask import TreeMask, bool_to_additive, pad_masks
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree

# Two committed rows, the anchor, and below it a fork whose left branch goes on:
#   anchor -> 0 -> 2
#   anchor -> 1
FORK = StepPlan(2, (3,), TokenTree((7, 8, 9), (ROOT, ROOT, 0))).mask()


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".#"[seen] for seen in row) for row in mask.tolist()]


def test_a_row_sees_the_prefix_its_ancestors_and_itself() -> None:
    assert FORK.rows == 4
    assert drawn(FORK.to_bool()) == [
        "###...",
        "####..",
        "###.#.",
        "####.#",
    ]


def test_a_window_hides_by_logical_position() -> None:
    # Positions: prefix 0 1, anchor 2, fork 3 3, leaf 4. The leaf stands three places behind the
    # anchor in memory and two behind it in the text.
    assert drawn(FORK.to_bool(window=2)) == [
        ".##...",
        "..##..",
        "..#.#.",
        "...#.#",
    ]
    assert drawn(FORK.to_bool(window=1)) == ["..#...", "...#..", "....#.", ".....#"]
    assert torch.equal(FORK.to_bool(window=5), FORK.to_bool())


def test_the_additive_form_is_zero_where_seen_and_minus_infinity_elsewhere() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        added = FORK.to_additive(dtype, window=2)
        assert added.dtype == dtype
        expected = [[0.0 if seen else -torch.inf for seen in row] for row in FORK.to_bool(window=2)]
        assert added.tolist() == expected


def test_a_mask_that_is_not_boolean_is_not_turned_into_an_additive_one() -> None:
    with pytest.raises(BackendError, match=r"expected a boolean mask, not one of torch\.int64"):
        bool_to_additive(torch.ones((2, 2), dtype=torch.int64), torch.float32)


@pytest.mark.parametrize(
    ("tree", "causal"),
    [
        (TokenTree(), True),
        (TokenTree.chain([1, 2, 3]), True),
        (TokenTree((1, 2), (ROOT, ROOT)), False),
        (TokenTree((1, 2, 3), (ROOT, 0, 0)), False),
    ],
)
@pytest.mark.parametrize("pending", [(5,), (5, 6)])
def test_only_a_chain_is_causal(pending: tuple[int, ...], tree: TokenTree, causal: bool) -> None:
    assert StepPlan(3, pending, tree).mask().is_causal is causal


def test_masks_of_a_batch_are_padded_to_the_widest() -> None:
    short = StepPlan(1, (3,)).mask()
    batch = pad_masks([FORK, short])
    assert batch.dtype == torch.bool
    assert drawn(batch[0]) == drawn(FORK.to_bool())
    assert drawn(batch[1]) == [
        "##....",  # its own prefix and row; the rest of the slot is not its business
        "#.....",  # padding sees one place, so that no softmax is empty
        "#.....",
        "#.....",
    ]


def test_a_batch_ends_where_its_longest_sequence_does() -> None:
    wide = StepPlan(0, (1, 2, 3)).mask()
    long = StepPlan(4, (1,)).mask()
    batch = pad_masks([wide, long])
    assert batch.shape == (2, 3, 4 + 1)
    assert drawn(batch[0]) == ["#....", "##...", "###.."]
    assert drawn(batch[1]) == ["#####", "#....", "#...."]


def test_a_batch_of_one_is_not_padded() -> None:
    assert torch.equal(pad_masks([FORK], window=2), FORK.to_bool(window=2)[None])


def test_a_mask_is_a_value() -> None:
    again = TreeMask(FORK.prefix, FORK.tin, FORK.tout, FORK.positions, FORK.lead)
    assert again == FORK
    assert hash(again) == hash(FORK)


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operation has made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.nbytes)
        return made


@pytest.mark.parametrize("window", [None, 40])
def test_nothing_larger_than_the_mask_is_made_on_the_way(window: int | None) -> None:
    mask = StepPlan(1000, (3,) * 50).mask()
    with LargestTensor() as memory:
        mask.to_bool(window=window)
    assert memory.largest == 50 * 1050  # a byte for each row and key
