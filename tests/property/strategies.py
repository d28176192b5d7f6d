"""Hypothesis strategies for the types of a step: trees, plans, masks, windows."""

from __future__ import annotations

from hypothesis import strategies as st

from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree

__all__ = ["plans", "trees", "windows"]


@st.composite
def trees(draw: st.DrawFn, *, max_nodes: int = 12, vocab_size: int = 4) -> TokenTree:
    """Return any tree; the vocabulary is small, so that siblings and paths are often equal."""
    size = draw(st.integers(0, max_nodes))
    tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=size, max_size=size))
    return TokenTree(tuple(tokens), tuple(draw(st.integers(-1, node - 1)) for node in range(size)))


@st.composite
def plans(draw: st.DrawFn, *, max_nodes: int = 10, max_prefix: int = 12) -> StepPlan:
    """Return any plan: a first pass or a later one, with one pending token or several."""
    pending = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    prefix = draw(st.integers(0, max_prefix))
    return StepPlan(prefix, tuple(pending), draw(trees(max_nodes=max_nodes)))


windows = st.none() | st.integers(1, 20)
