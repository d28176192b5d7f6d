"""Lookahead decoding (Fu et al., 2024, arXiv 2402.02057): a window of Jacobi iterations, as a tree.

The window has W columns and up to N-1 levels. Cell (0, 0) is the anchor. The parent of (r, j) is
(r-1, j), that of (0, j) is (0, j-1), so a cell's depth is r + j: the place of its guess in the text.
The model's tokens after the W cells of the top level are the next Jacobi iterate; with it, column j
spells the N-gram (level 0, ..., level N-2, iterate), which goes to the pool under its first token.
Then the lowest level is dropped and the iterate becomes the top. The pool's continuations of the
anchor are the candidates; they share nodes with the window and with each other where they agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decodekit.errors import ConfigError
from decodekit.interfaces import Budget, NGramPool, Proposal, StepOutcome
from decodekit.tree import ROOT, TokenTree

__all__ = ["Lookahead", "LookaheadConfig", "LookaheadProposer"]


@dataclass(kw_only=True)
class LookaheadConfig:
    name: str = "lookahead"
    window_size: int = 7
    ngram_size: int = 5
    max_candidates: int = 7
    prompt_ngrams: bool = True
    accepted_ngrams: bool = True
    realign: bool = True
    fill: str = "keep"
    init: str = "random"
    warm: bool = True
    ctx: int = 1


class Lookahead:
    def __init__(self, config):
        self.config = config
        c = config
        self.max_nodes = c.window_size * (c.ngram_size - 1) + c.max_candidates * (c.ngram_size - 1)

    def new_proposer(self):
        from decodekit.pool import RecentNGramPool
        return LookaheadProposer(self.config, RecentNGramPool(per_key=self.config.max_candidates))


class LookaheadProposer:
    def __init__(self, config, pool):
        self._config = config
        self._pool = pool
        self._levels = []
        self._cells = []
        self._entered = 0
        self._random = random.Random(0)

    def propose(self, committed, budget):
        c = self._config
        if not self._levels:
            if c.init == "random":
                self._levels = [[self._random.choice(committed) for _ in range(c.window_size)]]
            else:
                self._levels = [(list(committed) * c.window_size)[-c.window_size:]]
        self._enter_text(committed)
        self._levels[0][0] = committed[-1]
        depth = budget.useful_depth
        cands = [x[:depth] for x in self._pool.lookup(committed[-1])[:c.max_candidates]] if depth else []
        ctree = TokenTree.from_paths(cands).limited(nodes=budget.nodes, depth=budget.depth)
        self._cells = []
        if budget.tokens <= 1: return Proposal()
        window = self._window()
        tree, (wmap, _) = TokenTree.merge([window, ctree])
        if len(tree) > budget.nodes or max(tree.depths, default=0) > budget.depth:
            return Proposal(ctree)
        w = len(self._levels[0])
        top = len(self._levels) - 1
        at = lambda j: (ROOT if j == 0 else wmap[j - 1]) if top == 0 else wmap[w - 1 + (top - 1) * w + j]
        self._cells = [at(j) for j in range(w)]
        return Proposal(tree)

    def _window(self):
        lv = self._levels
        w = len(lv[0])
        tokens = list(lv[0][1:])
        parents = list(range(ROOT, w - 2))
        for r in range(1, len(lv)):
            for j in range(w):
                tokens.append(lv[r][j])
                if r == 1:
                    parents.append(j - 1)
                else:
                    parents.append(w - 1 + (r - 2) * w + j)
        return TokenTree(tuple(tokens), tuple(parents))

    def observe(self, outcome):
        c = self._config
        if not self._cells:
            return
        new = outcome.target.after_many(self._cells)
        full = len(self._levels) == c.ngram_size - 1
        if full or c.warm:
            for j in range(len(new)):
                self._pool.insert(self._levels[0][j], [lv[j] for lv in self._levels[1:]] + [new[j]])
        self._levels.append(new)
        if full:
            self._levels.pop(0)
            k = len(outcome.tokens) - 1
        else:
            k = len(outcome.tokens)
        if c.realign and k:
            w = c.window_size
            for i, lv in enumerate(self._levels):
                if c.fill == "keep":
                    self._levels[i] = (lv[k:] + lv[-min(k,w):])[:w]
                elif c.fill == "rotate":
                    kk = k % w
                    self._levels[i] = lv[kk:] + lv[:kk]
                else:
                    self._levels[i] = (lv[k:] + [self._random.choice(outcome.committed) for _ in range(min(k,w))])[:w]

    def _enter_text(self, committed):
        c = self._config
        n = c.ngram_size
        first = self._entered == 0
        start = max(self._entered - n + 1, 0)
        if (first and c.prompt_ngrams) or (not first and c.accepted_ngrams):
            for i in range(start, len(committed) - n + 1):
                self._pool.insert(committed[i], committed[i + 1 : i + n])
        self._entered = len(committed)
