"""What holds for every token tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decodekit.interfaces.tree import ROOT, TokenTree
from tests.property.strategies import trees


def ancestors(tree: TokenTree, node: int) -> set[int]:
    """Return ``node`` and its ancestors, from the parents alone."""
    line = {node}
    while tree.parents[node] != ROOT:
        node = tree.parents[node]
        line.add(node)
    return line


@given(trees(max_nodes=20))
def test_intervals_tell_ancestors_from_all_others(tree: TokenTree) -> None:
    tin, tout = tree.intervals
    assert sorted(tin) == list(range(len(tree)))
    for node in range(len(tree)):
        inside = {a for a in range(len(tree)) if tin[a] <= tin[node] < tout[a]}
        assert inside == ancestors(tree, node)


@given(trees())
def test_paths_depths_and_leaves_agree_with_the_parents(tree: TokenTree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert set(path) == ancestors(tree, node)
        assert list(path) == sorted(path)
        assert len(path) == tree.depths[node]
        assert tree.path_tokens(node) == tuple(tree.tokens[step] for step in path)
    assert set(tree.leaves) == set(range(len(tree))) - set(tree.parents)
    pairs = [(parent, child) for parent, below in tree.children.items() for child in below]
    assert sorted(pairs, key=lambda pair: pair[1]) == [
        (parent, child) for child, parent in enumerate(tree.parents)
    ]


@given(trees(), st.data())
def test_closure_is_the_least_subtree_that_holds_the_nodes(
    tree: TokenTree, data: st.DataObject
) -> None:
    nodes = data.draw(st.lists(st.integers(0, max(len(tree) - 1, 0)), max_size=len(tree)))
    closed = tree.closure(nodes)
    assert list(closed) == sorted(set().union(*(ancestors(tree, node) for node in nodes), set()))
    assert tree.closure(closed) == closed


@given(trees(), st.data())
def test_selecting_a_closed_set_keeps_every_path(tree: TokenTree, data: st.DataObject) -> None:
    nodes = data.draw(st.sets(st.integers(0, max(len(tree) - 1, 0)), max_size=len(tree)))
    closed = tree.closure(nodes)
    part = tree.select(closed)
    assert [part.path_tokens(new) for new in range(len(part))] == [
        tree.path_tokens(old) for old in closed
    ]


@given(st.lists(trees(max_nodes=8, vocab_size=3), max_size=4), st.booleans())
def test_merging_keeps_every_path_and_says_where_it_went(
    parts: list[TokenTree], dedupe: bool
) -> None:
    tree, maps = TokenTree.merge(parts, dedupe=dedupe)
    assert len(maps) == len(parts)
    for part, place in zip(parts, maps, strict=True):
        assert len(place) == len(part)
        for node in range(len(part)):
            assert tree.path_tokens(place[node]) == part.path_tokens(node)
    reached = [node for place in maps for node in place]
    assert set(reached) == set(range(len(tree)))  # nothing is made up
    paths = [tree.path_tokens(node) for node in range(len(tree))]
    if dedupe:
        assert len(set(paths)) == len(paths)
    else:
        assert reached == list(range(len(tree)))


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6))
def test_a_trie_holds_its_paths_and_their_beginnings_once(paths: list[list[int]]) -> None:
    tree = TokenTree.from_paths(paths)
    held = [tree.path_tokens(node) for node in range(len(tree))]
    wanted = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    assert len(held) == len(set(held))
    assert set(held) == wanted


@given(trees(), st.integers(0, 14), st.integers(0, 6))
def test_a_limited_tree_is_the_first_part_that_fits(
    tree: TokenTree, nodes: int, depth: int
) -> None:
    fits = [node for node in range(len(tree)) if len(ancestors(tree, node)) <= depth][:nodes]
    small = tree.limited(nodes=nodes, depth=depth)
    assert small == tree.select(fits)
    assert len(small) <= nodes
    assert max(small.depths, default=0) <= depth
