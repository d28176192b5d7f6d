"""Token trees on ``transformers`` causal language models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decodekit.adapters.hf.arguments import ForwardArguments
from decodekit.adapters.hf.attention import (
    NoStepError,
    StepAttention,
    attention_of,
    windows_of_masks,
)
from decodekit.adapters.hf.cache import HFCache
from decodekit.adapters.hf.longrope import LongRope
from decodekit.adapters.hf.support import (
    NO_INTERFACE,
    check_agreement,
    check_support,
    check_windows,
    refuse,
)
from decodekit.adapters.model_facts import (
    check_positions,
    eos_token_ids_of,
    input_device_of,
    max_positions_of,
)
from decodekit.adapters.model_lock import lock_of
from decodekit.adapters.plain_forward import takes
from decodekit.adapters.rows import check_prefixes, padded_rows
from decodekit.adapters.snapshot import Snapshot
from decodekit.errors import DecodekitError, GenerationError, ModelSupportError, shortened
from decodekit.interfaces.adapter import KVCache
from decodekit.interfaces.backend import AttentionBackend
from decodekit.interfaces.mask import TreeMask, bool_to_additive, pad_masks
from decodekit.interfaces.plan import StepPlan

__all__ = ["HFAdapter"]

_CHUNK = 512  # rows of a pass that computes keys anew


class HFAdapter:
    """Runs steps on a loaded model; the model itself is left as it was.

    A model that is changed later (cast, moved, hooked, put into training mode, another
    configuration) is looked at again when the next text begins, and refused then if need be.

    Args:
        model: A decoder-only model with a language-modelling head, in evaluation mode.
        backend: The attention kernel.

    Raises:
        ModelSupportError: The model cannot be decoded exactly, with the reason.
        BackendError: The backend does not support what the model asks of attention.
    """

    name = "hf"

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend) -> None:
        self.model = model
        self.backend = backend
        self._limit: int | None = None
        self._windows: set[tuple[int | None, int | None]] = set()
        self._snapshot: Snapshot | None = None
        self._checking = False
        self._follow()
        # Whoever packs the model next must not find its weights held here.
        self._snapshot = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: it looks at its own model when its first text begins."""
        return {**vars(self), "_snapshot": None}

    def _follow(self) -> Snapshot | None:
        """Look at the model again if it was changed; return what it is now.

        Raises:
            ModelSupportError: It cannot be decoded as it is now.
        """
        with lock_of(self.model):
            unchanged = self._snapshot is not None and self._snapshot.is_of(self.model)
            if not (unchanged or self._checking):
                self._checking, self._snapshot = True, None
                try:
                    self._check()
                finally:
                    self._checking = False
                self._snapshot = Snapshot(self.model)
            return self._snapshot

    def _check(self) -> None:
        check_support(self.model)
        self._arguments = ForwardArguments(self.model)
        self._long_rope = LongRope.of(self.model)
        self._own_kernel, doubt = False, None
        try:
            doubt = self._doubt_of_our_attention()
        except _OwnKernel:
            self._own_kernel, doubt = True, NO_INTERFACE
        check_agreement(self, doubt)

    @property
    def vocab_size(self) -> int:
        """V, the number of logits of a row."""
        return int(self.model.config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has, or None if its configuration names no limit."""
        return max_positions_of(self.model) if self._limit is None else self._limit

    def limit_positions(self, count: int) -> None:
        """Let a text have so many positions; see ``HasPositionLimit.limit_positions``."""
        check_positions(self.model, count)
        check_windows(self.model, self._windows, limit=count)
        self._limit = count

    @property
    def keeps_attention(self) -> bool:
        """Whether the model attends by its own kernel and not by the backend."""
        return self._own_kernel

    def horizon(self, length: int) -> int | None:
        """Return the positions that a pass may use; see ``HasHorizon.horizon``.

        A guess must not take a short text over LongRoPE's border: its row would need other keys
        than the rows before it.
        """
        rope = self._long_rope
        return rope.border if rope is not None and length <= rope.border else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text: all of the generation config, else the model config's."""
        return eos_token_ids_of(self.model)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return input_device_of(self.model)

    def new_cache(self, *, batch: int, capacity: int) -> HFCache:
        """Return an empty cache for ``batch`` sequences of at most ``capacity`` rows each."""
        layers = int(self.model.config.num_hidden_layers)
        key_rows = None if self._own_kernel else getattr(self.backend, "key_rows", None)
        return HFCache(layers=layers, batch=batch, capacity=capacity, key_rows=key_rows)

    @torch.inference_mode()
    def forward(self, plans: Sequence[StepPlan], cache: KVCache) -> list[Tensor]:
        """Run one step of B sequences in one pass; see ``ModelAdapter.forward``."""
        if not isinstance(cache, HFCache):
            raise GenerationError(f"the 'hf' adapter cannot use a {type(cache).__name__}")
        check_prefixes(plans, cache.lengths)
        # Between two tokens nobody changes a model, and comparing takes some of a millisecond.
        if any(plan.prefix == 0 for plan in plans):
            cache.suit(self._follow(), layers=int(self.model.config.num_hidden_layers))
        return self._run(plans, cache, self._long_texts(plans, cache))

    def _run(self, plans: Sequence[StepPlan], cache: HFCache, long: Sequence[bool]) -> list[Tensor]:
        """Run one step; ``long`` says which sequences are long texts for LongRoPE."""
        rows = max(plan.rows for plan in plans)
        cache.begin([plan.rows for plan in plans])
        if self._long_rope is not None:
            cache.running = [plan.tokens for plan in plans]
        device = self.device
        masks = [plan.mask() for plan in plans]
        tokens, positions = padded_rows(plans)
        # The head runs on the rows after which a token is needed: the anchor's and the nodes'.
        wanted = sorted({row for plan in plans for row in range(plan.anchor_row, plan.rows)})
        place = {row: index for index, row in enumerate(wanted)}
        inputs = self._arguments.of(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            cache=cache,
            wanted=wanted,
        )
        with self._long_rope.of_lengths(long) if self._long_rope else nullcontext():
            logits = self._arguments.kept(self._outputs(inputs, masks), rows=rows, wanted=wanted)
        # The rows of one sequence follow each other in what was kept.
        return [
            logits[index, place[plan.anchor_row] : place[plan.rows - 1] + 1]
            for index, plan in enumerate(plans)
        ]

    def _outputs(self, inputs: dict[str, Any], masks: list[TreeMask]) -> Any:
        if self._own_kernel:
            visible = pad_masks(masks, device=self.device)[:, None]
            mask = bool_to_additive(visible, self.model.dtype)
            return self.model(**inputs, attention_mask=mask)
        return self._with_our_attention(inputs, StepAttention(self.backend, masks))

    def _long_texts(self, plans: Sequence[StepPlan], cache: HFCache) -> list[bool]:
        """Return which sequences are long texts for LongRoPE, their keys in the cache included."""
        if self._long_rope is None:
            return [False] * len(plans)
        border = self._long_rope.border
        long = [plan.positions[plan.anchor_row] >= border for plan in plans]
        for plan, beyond in zip(plans, long, strict=True):
            if not beyond and max(plan.positions) >= border:
                raise GenerationError(
                    f"guesses after {plan.positions[plan.anchor_row] + 1} tokens must end before "
                    f"position {border}, where LongRoPE takes other frequencies; ask horizon()"
                )
        for index, (plan, beyond) in enumerate(zip(plans, long, strict=True)):
            if plan.prefix and cache.is_long[index] != beyond:
                cache.take(index, self._copy_as(beyond, cache.texts[index]))
            cache.is_long[index] = beyond
        return long

    def _copy_as(self, long: bool, text: Sequence[int]) -> HFCache:
        """Return a cache of a text as a part of a long one, or of a short one."""
        copy = self.new_cache(batch=1, capacity=len(text))
        for start in range(0, len(text), _CHUNK):
            chunk = tuple(text[start : start + _CHUNK])
            self._run([StepPlan(start, chunk)], copy, [long])
            copy.commit([range(len(chunk))])
        return copy

    def _with_our_attention(self, inputs: dict[str, Any], step: StepAttention) -> Any:
        handed = {"decodekit_step": step} if self._arguments.takes_more else {}
        with attention_of(self.model):
            return self.model(**inputs, attention_mask=step.carrier(self.device), **handed)

    @torch.inference_mode()
    def _doubt_of_our_attention(self) -> str | None:
        """Run two tokens through all layers; return what is not certain of it.

        What a backend refuses, it refuses here, not in mid-text. Two, since a layer that adds
        something to its mask could add it for one row to an empty one.

        Raises:
            _OwnKernel: No layer called our attention.
            ModelSupportError: Only some did, or they fail with it.
        """
        cache = self.new_cache(batch=1, capacity=2)
        plan = StepPlan(prefix=0, pending=(0, 0))
        cache.begin([2])
        step = StepAttention(self.backend, [plan.mask()])
        tokens = torch.tensor([plan.tokens], device=self.device)
        positions = torch.tensor([plan.positions], device=self.device)
        layers = int(self.model.config.num_hidden_layers)
        try:
            inputs = self._arguments.of(tokens, positions, cache=cache, wanted=[1])
            self._with_our_attention(inputs, step)
        except NoStepError as error:  # the model keeps to itself what it was given
            if step.layers:
                refuse(self.model, _few(step, layers))
            raise _OwnKernel from error
        except DecodekitError:
            raise
        except Exception as error:
            try:
                plain = {"use_cache": False} if takes(self.model, "use_cache") else {}
                self.model(input_ids=tokens, **plain)
            except Exception as own:
                reason = f"the model itself fails on two tokens: {shortened(own)}"
                raise ModelSupportError(reason, reason=reason) from own
            if step.layers:
                refuse(self.model, f"it fails with our attention: {shortened(error)}")
            raise _OwnKernel from error  # what it did with the empty mask failed, as it must
        if not step.layers:
            raise _OwnKernel
        if step.layers < layers:
            refuse(self.model, _few(step, layers))
        # In loops, which may take keys of other loops from the cache.
        doubt = "its layers run more than once in a pass" if step.layers > layers else None
        self._windows = windows_of_masks(self.model, step, tokens)
        check_windows(self.model, self._windows, limit=self.max_positions)
        return doubt


class _OwnKernel(Exception):  # noqa: N818  # no mistake of anybody
    """The model attends by itself."""


def _few(step: StepAttention, layers: int) -> str:
    return f"only {step.layers} of its {layers} layers attend as others do"
