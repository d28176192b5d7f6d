"""Does an adapter compute what its model computes? Found out before any text is decoded.

A model may ignore what it is given: positions, a mask, a cache, which logits to keep. Then all
strategies over the adapter are wrong alike, and nothing that compares them can tell. So a few
tokens are run as a tree behind a prefix, and each path as the model runs it itself.

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decodekit.adapters.model_code import places_of
from decodekit.adapters.plain_forward import plain_logits
from decodekit.adapters.snapshot import buffers_of, settings_of, version_of
from decodekit.interfaces.adapter import HasHorizon, ModelAdapter
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree

__all__ = ["agrees"]

_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The largest difference of two logits, relative to the largest."""

_NOISE = 0.2
"""Of other dtypes and of quantised weights: the difference, root of the mean square, relative to
the spread of the logits. SmolLM2-135M in bfloat16: up to 0.11 by rounding, and more than 0.6 with
rows at wrong positions."""

_SHIFTS = (1000, 5000, 20000)
"""Of the token ids below, tried in turn where there is noise, which may send a token to another
expert. The first few hundred are often special tokens, whose logits are far noisier."""

_PROMPT = (5, 3, 8, 2, 7)
_PREFIX = 3  # of them in the cache
_TOKENS = (1, 9, 4, 6, 11, 13, 10, 12, 15)
# Many siblings before the deepest path: rows and positions lie far apart.
_PARENTS = (ROOT, ROOT, ROOT, ROOT, ROOT, ROOT, 0, 5, 7)
_PATHS = ((0, 6), (5, 7, 8))

_passed: WeakKeyDictionary[Any, dict[tuple[type, type], object]] = WeakKeyDictionary()


def agrees(adapter: ModelAdapter, model: Any) -> bool:
    """Return whether a tree's rows have the logits that the model itself gives their paths.

    A model that has passed with such an adapter and such a backend, and is the same, passes again.
    """
    key = (type(adapter), type(getattr(adapter, "backend", None)))
    passed = _passed.setdefault(model, {})
    if passed.get(key) == _mark(model):
        return True
    shifts = _SHIFTS[:1] if _is_exact(model) else _SHIFTS
    good = any(_agrees_on_a_tree(adapter, model, shift=shift) for shift in shifts)
    if good:
        passed[key] = _mark(model)
    return good


def _mark(model: Any) -> tuple[object, ...]:
    """Return what tells a model that was changed; it holds none of its weights."""
    return (
        [(type(module), type(module).forward, module.training) for module in model.modules()],
        [(weight.data_ptr(), weight.dtype, weight.shape) for weight in model.parameters()],
        ["forward" in vars(module) for module in model.modules()],
        # Hooks by numbers that torch gives out once; buffers by how often they were written into.
        [(*module._forward_hooks, -1, *module._forward_pre_hooks) for module in model.modules()],
        [(buffer.data_ptr(), version_of(buffer)) for buffer in buffers_of(model)],
        [attributes[name] for attributes, name in settings_of(model)],
        [id(held.get(name)) for held, name in places_of(model)],
        str(model.config),
    )


def _is_exact(model: Any) -> bool:
    quantised = getattr(model.config, "quantization_config", None) is not None
    special = any(type(weight) is not torch.nn.Parameter for weight in model.parameters())
    return model.dtype in _CLOSE and not quantised and not special


@torch.inference_mode()
def _agrees_on_a_tree(adapter: ModelAdapter, model: Any, *, shift: int) -> bool:
    prompt, tree = _text(adapter, shift)
    lead = prompt[_PREFIX:]
    cache = adapter.new_cache(batch=1, capacity=len(prompt) + len(tree))
    adapter.forward([StepPlan(0, prompt[:_PREFIX])], cache)
    cache.commit([range(_PREFIX)])
    (rows,) = adapter.forward([StepPlan(_PREFIX, lead, tree)], cache)
    paths = [tuple(node for node in path if node < len(tree)) for path in _PATHS]
    for path in paths:
        text = (*prompt, *(tree.tokens[node] for node in path))
        own = plain_logits(model, text, range(len(prompt) - 1, len(text)))
        mine = rows[[0, *(node + 1 for node in path)]]
        if not _close(mine, own, model):
            return False
    *kept, last = (ROOT, *paths[-1])  # a path that is no leading run, and one token behind it
    if last == ROOT:
        return True
    cache.commit([[*range(len(lead)), *(len(lead) + node for node in kept if node != ROOT)]])
    plan = StepPlan(cache.lengths[0], (tree.tokens[last],))
    (after,) = adapter.forward([plan], cache)
    return _close(after, own[-1:], model)


def _text(adapter: ModelAdapter, shift: int) -> tuple[tuple[int, ...], TokenTree]:
    """Return a prompt and a tree that the model has positions for."""
    size = adapter.vocab_size
    limits = [adapter.max_positions]
    if isinstance(adapter, HasHorizon):
        limits.append(adapter.horizon(len(_PROMPT)))
    depth = min((limit - len(_PROMPT) for limit in limits if limit is not None), default=3)
    prompt = tuple((token + shift) % size for token in _PROMPT)
    tokens = tuple((token + shift) % size for token in _TOKENS)
    # The tree loses its deepest nodes, which come last.
    return prompt, TokenTree(tokens, _PARENTS).limited(nodes=len(tokens), depth=max(0, depth))


def _close(mine: Tensor, own: Tensor, model: Any) -> bool:
    """Return whether logits [N, V] are the same but for rounding."""
    if mine.shape != own.shape:
        return False
    if not bool(own.isfinite().all()):
        return True  # a broken model: its texts end with an error
    mine, own = mine.float().cpu(), own.float().cpu()
    apart = mine - own
    if _is_exact(model):
        limit = _CLOSE[model.dtype] * (1 + own.abs().amax(dim=-1))
        return bool((apart.abs().amax(dim=-1) <= limit).all())
    resolution = own.abs().amax(dim=-1) * 2**-7
    limit = _NOISE * own.std(dim=-1) + resolution
    return bool((apart.square().mean(dim=-1).sqrt() <= limit).all())
