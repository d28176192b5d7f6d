"""Token trees, by hand-made examples; ``tests/property/test_tree_laws.py`` has the laws."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from decodekit.errors import GenerationError, TreeError
from decodekit.interfaces.tree import EMPTY_TREE, ROOT, TokenTree

#        anchor
#        /    \
#    0:10      1:20
#    /   \       |
# 2:11   3:12   4:21
#          |
#        5:13
BUSH = TokenTree((10, 20, 11, 12, 21, 13), (ROOT, ROOT, 0, 0, 1, 3))


def test_a_chain_is_one_path() -> None:
    chain = TokenTree.chain([7, 8, 9])
    assert chain == TokenTree((7, 8, 9), (ROOT, 0, 1))
    assert chain.depths == (1, 2, 3)
    assert chain.leaves == (2,)
    assert chain.path(2) == (0, 1, 2)


def test_the_empty_tree_has_nothing() -> None:
    for tree in (EMPTY_TREE, TokenTree.chain([]), TokenTree.from_paths([]), TokenTree.merge([])[0]):
        assert tree == EMPTY_TREE
        assert len(tree) == 0
        assert tree.depths == tree.leaves == tree.closure([]) == ()
        assert tree.intervals == ((), ())
        assert tree.children == {}
        assert tree.path(ROOT) == tree.path_tokens(ROOT) == ()


def test_the_parts_of_a_bush() -> None:
    assert len(BUSH) == 6
    assert BUSH.depths == (1, 1, 2, 2, 2, 3)
    assert BUSH.leaves == (2, 4, 5)
    assert BUSH.children == {ROOT: [0, 1], 0: [2, 3], 1: [4], 3: [5]}
    assert [BUSH.path(node) for node in range(6)] == [
        (0,),
        (1,),
        (0, 2),
        (0, 3),
        (1, 4),
        (0, 3, 5),
    ]
    assert BUSH.path_tokens(5) == (10, 12, 13)


@pytest.mark.parametrize(
    ("nodes", "closed"),
    [([], ()), ([5], (0, 3, 5)), ([4, 2], (0, 1, 2, 4)), ([0, 0], (0,)), ([5, 3, 0], (0, 3, 5))],
)
def test_closure_adds_the_ancestors_in_ascending_order(
    nodes: list[int], closed: tuple[int, ...]
) -> None:
    assert BUSH.closure(nodes) == closed


def test_select_keeps_tokens_and_renumbers_parents() -> None:
    assert BUSH.select([0, 3, 5]) == TokenTree.chain([10, 12, 13])
    assert BUSH.select([1, 4]) == TokenTree.chain([20, 21])
    assert BUSH.select([0, 1, 2]) == TokenTree((10, 20, 11), (ROOT, ROOT, 0))
    assert BUSH.select(range(6)) == BUSH
    assert BUSH.select([]) == EMPTY_TREE


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([5], id="without its parent"),
        pytest.param([0, 5], id="without its parent, but with a grandparent"),
        pytest.param([3, 0], id="child first"),
        pytest.param([1, 0], id="siblings out of order"),
        pytest.param([0, 0], id="twice"),
    ],
)
def test_select_refuses_what_is_no_subtree_in_order(nodes: list[int]) -> None:
    with pytest.raises(TreeError):
        BUSH.select(nodes)


def test_merge_shares_equal_paths() -> None:
    left = TokenTree.chain([1, 2, 3])
    right = TokenTree.chain([1, 2, 4])
    tree, maps = TokenTree.merge([left, right])
    assert tree == TokenTree((1, 2, 3, 4), (ROOT, 0, 1, 1))
    assert maps == ((0, 1, 2), (0, 1, 3))


def test_merge_shares_equal_siblings_of_one_tree() -> None:
    twins = TokenTree((1, 1, 2, 2), (ROOT, ROOT, 0, 1))
    tree, maps = TokenTree.merge([twins])
    assert tree == TokenTree.chain([1, 2])
    assert maps == ((0, 0, 1, 1),)


def test_merge_tells_equal_tokens_under_other_parents_apart() -> None:
    tree, _ = TokenTree.merge([TokenTree.chain([1, 2]), TokenTree.chain([2, 2])])
    assert tree == TokenTree((1, 2, 2, 2), (ROOT, 0, ROOT, 2))


def test_merge_without_dedupe_keeps_every_node() -> None:
    chain = TokenTree.chain([1, 2])
    tree, maps = TokenTree.merge([chain, EMPTY_TREE, chain], dedupe=False)
    assert tree == TokenTree((1, 2, 1, 2), (ROOT, 0, ROOT, 2))
    assert maps == ((0, 1), (), (2, 3))


def test_from_paths_is_a_trie_in_the_order_of_the_paths() -> None:
    assert TokenTree.from_paths([[5, 6], [5, 7], [8], [5, 6]]) == TokenTree(
        (5, 6, 7, 8), (ROOT, 0, 0, ROOT)
    )


@pytest.mark.parametrize(
    ("nodes", "depth", "kept"),
    [
        (6, 3, [0, 1, 2, 3, 4, 5]),
        (9, 9, [0, 1, 2, 3, 4, 5]),
        (6, 2, [0, 1, 2, 3, 4]),
        (6, 1, [0, 1]),
        (3, 3, [0, 1, 2]),
        (3, 1, [0, 1]),
        (0, 3, []),
        (6, 0, []),
        (-1, 3, []),
        (6, -1, []),
    ],
)
def test_limited_keeps_the_first_nodes_that_are_not_too_deep(
    nodes: int, depth: int, kept: list[int]
) -> None:
    assert BUSH.limited(nodes=nodes, depth=depth) == BUSH.select(kept)


def test_intervals_of_a_depth_first_walk() -> None:
    # The walk visits 0, 2, 3, 5, 1, 4.
    assert BUSH.intervals == ((0, 4, 1, 2, 5, 3), (4, 6, 2, 4, 6, 4))


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((1, 2), (ROOT,), "one parent per token: 2 tokens, 1 parents"),
        ((1, 2), (ROOT, 1), "the parent of node 1 must come before it, not be 1"),
        ((1, 2), (1, ROOT), "the parent of node 0 must come before it, not be 1"),
        ((1,), (-2,), "the parent of node 0 must come before it, not be -2"),
    ],
)
def test_a_malformed_tree_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], message: str
) -> None:
    with pytest.raises(TreeError, match=message) as caught:
        TokenTree(tokens, parents)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GenerationError)


def test_a_tree_is_a_value() -> None:
    again = TokenTree(BUSH.tokens, BUSH.parents)
    assert BUSH.intervals  # what is cached is no part of the value
    assert again == BUSH
    assert hash(again) == hash(BUSH)
    assert pickle.loads(pickle.dumps(BUSH)) == BUSH
    with pytest.raises(FrozenInstanceError):
        BUSH.tokens = ()  # type: ignore[misc]
