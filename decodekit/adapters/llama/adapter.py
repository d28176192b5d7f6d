"""Token trees on checkpoints of the LLaMA family, through a forward pass of our own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decodekit.adapters.execution.compiled import CompiledRows
from decodekit.adapters.execution.fused import layers_lock
from decodekit.adapters.execution.graphs import Capture, check_graphs, cuda_capture
from decodekit.adapters.execution.native.library import NativeLibrary, native_library
from decodekit.adapters.llama.cache import LlamaCache
from decodekit.adapters.llama.forward import LeanForward, cache_shape
from decodekit.adapters.llama.layer import between_attentions
from decodekit.adapters.llama.native_pass import NativeForward, native_obstacle
from decodekit.adapters.llama.recorded_pass import run_recorded
from decodekit.adapters.llama.support import check_agreement, check_support
from decodekit.adapters.model_facts import check_positions, eos_token_ids_of, max_positions_of
from decodekit.adapters.rows import check_prefixes, padded_rows
from decodekit.errors import ConfigError, GenerationError
from decodekit.interfaces.adapter import Compilation, KVCache
from decodekit.interfaces.backend import AttentionBackend
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan

__all__ = ["LlamaAdapter"]


class _Passes(NamedTuple):
    """The passes over one model's weights: in torch, and in C++ if that was asked for."""

    lean: LeanForward
    native: NativeForward | None


class LlamaAdapter:
    """Runs steps with the weights of a loaded model, which stays usable and keeps its values.

    Its query, key and value weights, and those of gate and up, are laid one behind the other and
    become views, so that nothing is held twice. A model that is changed later is read anew when the
    next text begins; one that got a hook, say, is refused then.

    Args:
        model: Of the LLaMA family, in evaluation mode.
        backend: The attention kernel.

    Raises:
        ModelSupportError: The model computes something else, or cannot be read; with the reason.
        BackendError: The backend does not support what is asked of attention.
    """

    name = "llama"

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend) -> None:
        check_support(model)
        self.model = model
        self.backend = backend
        self._limit: int | None = None
        self._passes: _Passes | None = None
        self._library: NativeLibrary | None = None
        self._compiled: CompiledRows | None = None
        self._capture: Capture | None = None
        self._checking = False
        # What a backend refuses, it refuses now too, not in mid-text.
        self._check()
        # Whoever packs the model next must not find its weights held here.
        self._passes = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: its passes, which hold addresses, it lays out itself."""
        return {**vars(self), "_passes": None}

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
        self._limit = count

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text: all of the generation config, else the model config's."""
        return eos_token_ids_of(self.model)

    def new_cache(self, *, batch: int, capacity: int) -> LlamaCache:
        """Return an empty cache for ``batch`` sequences of at most ``capacity`` rows each."""
        layers, heads, dim = cache_shape(self.model)
        weight = self.model.get_input_embeddings().weight
        return LlamaCache(
            layers=layers,
            heads=heads,
            dim=dim,
            key_rows=getattr(self.backend, "key_rows", None),
            batch=batch,
            capacity=capacity,
            dtype=weight.dtype,
            device=weight.device,
            spare=0 if self._capture is None else 1,
        )

    @property
    def compilation(self) -> Compilation | None:
        """What compiling has cost so far; None where nothing is compiled."""
        if self._library is not None:
            return Compilation(int(self._library.seconds > 0), self._library.seconds)
        compiled = self._compiled
        if compiled is None:
            return None
        return Compilation(compiled.compilations, compiled.seconds)

    def use_execution(self, mode: str, *, capture: Capture = cuda_capture) -> None:
        """Launch passes in another way from now on; see ``HasExecution.use_execution``.

        Args:
            mode: ``eager``, ``native``, ``compiled`` or ``graphs``.
            capture: What records a pass for ``graphs``.

        Raises:
            ConfigError: There is no compiler, no GPU, the backend is none that can be recorded, or
                the model is none that ``native`` has kernels for.
        """
        if mode == "native":
            reason = self.native_obstacle()
            if reason is not None:
                raise ConfigError(
                    f"execution=native cannot run this: {reason}; use execution=auto",
                    key="execution",
                    value="native",
                )
        if mode == "graphs":
            if capture is cuda_capture:
                check_graphs(self.model.get_input_embeddings().weight.device)
            if self.backend.name not in ("sdpa", "auto"):  # on a GPU they are the same
                raise ConfigError(
                    "execution=graphs attends by torch's sdpa with a mask of fixed size; use "
                    f"backend=sdpa, not {self.backend.name}",
                    key="backend",
                    value=self.backend.name,
                )
        self._library = native_library() if mode == "native" else None
        self._passes = None
        self._capture = capture if mode == "graphs" else None
        self._compiled = CompiledRows(between_attentions) if mode == "compiled" else None
        if mode != "eager":  # what cannot work fails now, not in mid-text
            self.forward([StepPlan(prefix=0, pending=(0,))], self.new_cache(batch=1, capacity=1))

    @torch.inference_mode()
    def forward(self, plans: Sequence[StepPlan], cache: KVCache) -> list[Tensor]:
        """Run one step of B sequences in one pass; see ``ModelAdapter.forward``."""
        if not isinstance(cache, LlamaCache):
            raise GenerationError(f"the 'llama' adapter cannot use a {type(cache).__name__}")
        check_prefixes(plans, cache.lengths)
        # Between two tokens nobody exchanges weights, and comparing would take half a millisecond.
        lean, native = self._current(compare=any(plan.prefix == 0 for plan in plans))
        cache.suit(lean.cache_shape, dtype=lean.dtype, device=lean.device)
        cache.begin([plan.rows for plan in plans])
        if native is not None:
            return native.run(plans, cache)
        masks = [plan.mask() for plan in plans]
        if self._capture is not None and cache.has_spare:
            recorded = run_recorded(lean, plans, masks, cache, self._capture)
            if recorded is not None:
                return [
                    logits[plan.anchor_row : plan.rows].clone()
                    for logits, plan in zip(recorded, plans, strict=True)
                ]
        with nullcontext() if self._compiled is None else self._compiled.counted():
            return self._run(lean, plans, masks, cache)

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return where rows are largest, found by the native library; see ``HasArgmax.largest``."""
        return None if self._library is None else self._library.largest(rows)

    def native_obstacle(self) -> str | None:
        """Return why ``execution=native`` cannot work with this model and backend; None if it can.

        Compiles the library if that has not been done before.
        """
        if self.backend.name != "auto":
            return f"it attends by itself, so it needs backend=auto, not {self.backend.name}"
        laid_out = self._passes is not None
        try:
            lean = self._current().lean
            if lean.device.type != "cpu":  # before anything is compiled
                return f"it is for the CPU, and the model is on {lean.device}"
            return native_obstacle(lean, native_library())
        except ConfigError as error:
            return str(error)
        finally:
            if not laid_out:  # whoever packs the model next must not find its weights held here
                self._passes = None

    def _run(
        self,
        lean: LeanForward,
        plans: Sequence[StepPlan],
        masks: list[TreeMask],
        cache: LlamaCache,
    ) -> list[Tensor]:
        rows = max(plan.rows for plan in plans)
        tokens, positions = torch.tensor(padded_rows(plans), device=cache.device)
        logits = lean.run(
            tokens,
            positions,
            end=1 + max(max(mask.positions) for mask in masks),
            # Those after which a token is needed: the anchor's and the nodes'.
            wanted=[
                index * rows + row
                for index, plan in enumerate(plans)
                for row in range(plan.anchor_row, plan.rows)
            ],
            cache=cache,
            backend=self.backend,
            lowered={
                window: self.backend.lower(
                    masks, window=window, dtype=cache.dtype, device=cache.device
                )
                for window in lean.windows
            },
            between=self._compiled,
        )
        return list(torch.split(logits, [1 + len(plan.tree) for plan in plans]))

    def _check(self) -> None:
        """Check that the passes compute what the model, as it is now, computes.

        Raises:
            ModelSupportError: They do not.
        """
        self._checking = True
        try:
            check_agreement(self, self.model)
        except BaseException:
            self._passes = None
            raise
        finally:
            self._checking = False

    def _current(self, *, compare: bool = True) -> _Passes:
        """Return the passes over the model's weights, made anew if they were exchanged.

        Args:
            compare: Whether to look for that, if there are passes already.
        """
        passes = self._passes  # another thread may exchange it meanwhile
        if passes is None or (compare and not passes.lean.is_of(self.model)):
            self._passes = passes = None  # let go of the old weights first
            # Packed meanwhile, the old weights would be held as well, and nothing would tell.
            with layers_lock:
                check_support(self.model)
                lean = LeanForward(self.model)
                native = None
                # A model that was changed into one that there are no kernels for still runs.
                if self._library is not None and native_obstacle(lean, self._library) is None:
                    native = NativeForward(lean, self._library)
                self._passes = passes = _Passes(lean, native)
            if not self._checking:
                self._check()
        return passes
