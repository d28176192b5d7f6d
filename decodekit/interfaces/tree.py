"""Token trees: what a decoding step asks the model about.

Every step of every strategy is one forward pass over a tree of tokens that hangs off the *anchor*,
the last committed token. A node attends to the committed prefix, to its ancestors and to itself, so
its logits are exactly the model's logits after that path. A chain is a prompt-lookup draft, a comb
is a lookahead window, a bush is a set of candidates; all are this one type.

Nothing here knows about tensors: the host works in Python integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from decodekit.errors import TreeError

__all__ = ["EMPTY_TREE", "ROOT", "TokenTree"]

ROOT = -1
"""The parent of the nodes that follow the anchor directly."""


@dataclass(frozen=True)
class TokenTree:
    """A tree of T guessed tokens below the anchor, parents before children.

    Attributes:
        tokens: The token id of each node, length T.
        parents: The parent of each node, length T: ``ROOT`` or the index of an earlier node.

    Raises:
        TreeError: The lengths differ, or a parent does not come before its child.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise TreeError(
                f"a tree needs one parent per token: {len(self.tokens)} tokens, "
                f"{len(self.parents)} parents"
            )
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise TreeError(f"the parent of node {node} must come before it, not be {parent}")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> TokenTree:
        """Return the tree with one path, ``tokens`` in order below the anchor."""
        run = tuple(tokens)
        return cls(run, tuple(range(ROOT, len(run) - 1)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The distance of each node from the anchor, from 1; the node's position offset."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The children of every inner node and of ``ROOT``, in ascending order."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    @property
    def leaves(self) -> tuple[int, ...]:
        """The nodes without children, in ascending order."""
        return tuple(node for node in range(len(self)) if node not in self.children)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the anchor's child down to ``node``, both included."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Return the tokens on the path from below the anchor down to ``node``."""
        return tuple(self.tokens[step] for step in self.path(node))

    def closure(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Return ``nodes`` and their ancestors, ascending: the least subtree that holds them."""
        closed: set[int] = set()
        for node in nodes:
            while node != ROOT and node not in closed:
                closed.add(node)
                node = self.parents[node]
        return tuple(sorted(closed))

    def select(self, nodes: Sequence[int]) -> TokenTree:
        """Return the subtree of ``nodes``, which must be ascending and closed under parents.

        Node ``i`` of the result is ``nodes[i]`` here.

        Raises:
            TreeError: A node comes without its parent, or out of order.
        """
        place = {ROOT: ROOT}
        parents: list[int] = []
        last = ROOT
        for new, old in enumerate(nodes):
            if old <= last or self.parents[old] not in place:
                raise TreeError(
                    "a selection must be ascending and hold the parent of every node in it"
                )
            parents.append(place[self.parents[old]])
            place[old] = new
            last = old
        return TokenTree(tuple(self.tokens[old] for old in nodes), tuple(parents))

    @classmethod
    def merge(
        cls, trees: Sequence[TokenTree], *, dedupe: bool = True
    ) -> tuple[TokenTree, tuple[tuple[int, ...], ...]]:
        """Join trees below one anchor.

        Args:
            trees: The trees, most important first: the first tree's nodes keep their numbers when
                it holds no duplicates itself.
            dedupe: Let equal paths share nodes. It saves rows and changes nothing else, since
                equal paths have equal logits.

        Returns:
            The joined tree, and for each input tree the map from its nodes to the joined ones.
        """
        tokens: list[int] = []
        parents: list[int] = []
        seen: dict[tuple[int, int], int] = {}
        maps: list[tuple[int, ...]] = []
        for tree in trees:
            place: list[int] = []
            for token, parent in zip(tree.tokens, tree.parents, strict=True):
                above = ROOT if parent == ROOT else place[parent]
                key = (above, token)
                node = seen.get(key) if dedupe else None
                if node is None:
                    node = len(tokens)
                    tokens.append(token)
                    parents.append(above)
                    seen[key] = node
                place.append(node)
            maps.append(tuple(place))
        return cls(tuple(tokens), tuple(parents)), tuple(maps)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Return the trie of token ``paths`` below the anchor, the first path's nodes first."""
        tree, _ = cls.merge([cls.chain(path) for path in paths])
        return tree

    def limited(self, *, nodes: int, depth: int) -> TokenTree:
        """Return the tree without the nodes deeper than ``depth``, cut to the first ``nodes``.

        Parents come before children, so what remains is a tree.
        """
        if len(self) <= nodes and max(self.depths, default=0) <= depth:
            return self
        keep = [node for node, below in enumerate(self.depths) if below <= depth]
        return self.select(keep[: max(nodes, 0)])

    @cached_property
    def intervals(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The times ``(tin, tout)`` of a depth-first walk, each of length T.

        Node ``a`` is ``b`` or an ancestor of ``b`` if and only if ``tin[a] <= tin[b] < tout[a]``.
        This is all that an attention mask needs to know of the tree: O(T) numbers.
        """
        size = [1] * len(self)
        for node in range(len(self) - 1, -1, -1):
            if self.parents[node] != ROOT:
                size[self.parents[node]] += size[node]
        tin: list[int] = []
        free = {ROOT: 0}  # the next unused time below each node
        for node, parent in enumerate(self.parents):
            start = free[parent]
            tin.append(start)
            free[parent] = start + size[node]
            free[node] = start + 1
        return tuple(tin), tuple(start + span for start, span in zip(tin, size, strict=True))


EMPTY_TREE = TokenTree()
"""The tree of plain autoregressive decoding: nothing is guessed."""
