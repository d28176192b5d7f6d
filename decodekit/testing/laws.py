"""What the suites share: saying which law is broken, and random trees."""

from __future__ import annotations

import random

import numpy as np
import torch

from decodekit.interfaces.tree import ROOT, TokenTree

__all__ = ["generators", "law", "random_tokens", "random_tree", "reordered"]


def law(holds: bool, name: str, detail: str) -> None:
    """Raise unless a law holds.

    Args:
        holds: Whether it does.
        name: The law, as a short statement.
        detail: The input, and what came of it.

    Raises:
        AssertionError: It does not hold.
    """
    if not holds:
        raise AssertionError(f"broken law: {name}; {detail}")


def random_tokens(choose: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    """Return so many tokens of the vocabulary."""
    return tuple(choose.randrange(vocab_size) for _ in range(count))


def random_tree(
    choose: random.Random, nodes: int, vocab_size: int, *, depth: int = 64
) -> TokenTree:
    """Return a tree of so many nodes at most: chains, bushes and duplicate siblings among them."""
    parents: list[int] = []
    for node in range(nodes):
        recent = choose.random() < 0.4  # otherwise all trees would be flat
        parents.append(node - 1 if recent else choose.randrange(ROOT, node))
    tree = TokenTree(random_tokens(choose, nodes, vocab_size), tuple(parents))
    return tree.limited(nodes=nodes, depth=depth)


def reordered(choose: random.Random, tree: TokenTree) -> tuple[TokenTree, tuple[int, ...]]:
    """Return the tree with its nodes in another order, and where each node went."""
    order: list[int] = []
    place: dict[int, int] = {ROOT: ROOT}
    while len(order) < len(tree):
        ready = [n for n in range(len(tree)) if n not in place and tree.parents[n] in place]
        node = choose.choice(ready)
        place[node] = len(order)
        order.append(node)
    other = TokenTree(
        tuple(tree.tokens[node] for node in order),
        tuple(place[tree.parents[node]] for node in order),
    )
    return other, tuple(place[node] for node in range(len(tree)))


def generators() -> tuple[object, ...]:
    """Return the states of the global random generators, as values that can be compared."""
    kind, keys, *place = np.random.get_state(legacy=True)
    torch_state = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), torch_state, kind, np.asarray(keys).tobytes(), *place
