"""The compiled library, called from Python: its structures, and one pass.

Shapes: B sequences, R rows of all of them, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decodekit.adapters.execution.native.build import build_library
from decodekit.errors import ConfigError, GenerationError

__all__ = [
    "DTYPES",
    "LANES",
    "NativeLibrary",
    "NativeModel",
    "Step",
    "native_library",
]

LANES = 16
"""Sizes are multiples of this: a vector of AVX-512, or two of AVX2; inputs of runs of 64 bytes."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What there are kernels for; the library asks whether it is the half of float32."""

_LAYER_WEIGHTS = (
    "attention_norm",
    "qkv",
    "qkv_bias",
    "out",
    "out_bias",
    "mlp_norm",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
)

_MODEL_SIZES = ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "vocabulary")

_MODEL_WEIGHTS = ("embedding", "norm", "head", "head_bias")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _LAYER_WEIGHTS),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_double),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _MODEL_SIZES),
        ("epsilon", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _MODEL_WEIGHTS),
        ("layer", ctypes.POINTER(_Layer)),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("sequences", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("wanted", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("start", "prefix", "token", "position", "tin", "tout", "wanted_row")
        ),
        ("turns", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
    ]


class NativeModel:
    """A model's weights as the library reads them, where they are.

    Whoever makes one has checked that all of them have the sizes that the first layer's suggest.

    Args:
        weights: ``embedding``, ``norm``, ``head`` and ``head_bias``, tensors or None.
        layers: Of each layer its weights, tensors or None, with ``window`` (None for full
            attention) and ``scale``.
        heads: Query heads.
        kv_heads: Key and value heads.
        epsilon: Of the norms.

    Attributes:
        dtype: Of all weights.
        tokens: How many tokens can be embedded.
        vocabulary: V.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor | None],
        layers: Sequence[Mapping[str, Any]],
        *,
        heads: int,
        kv_heads: int,
        epsilon: float,
    ) -> None:
        embedding, head = weights["embedding"], weights["head"]
        assert embedding is not None
        assert head is not None
        self.dtype = embedding.dtype
        self.tokens, hidden = embedding.shape
        self.vocabulary = head.shape[0]
        self._held = [weights, layers]  # addresses do not keep anything alive
        table = (_Layer * len(layers))()
        for place, layer in zip(table, layers, strict=True):
            for name in _LAYER_WEIGHTS:
                setattr(place, name, _address(layer[name]))
            place.window = layer["window"] or 0
            place.scale = layer["scale"]
        first = layers[0]
        self.structure = _Model(
            layers=len(layers),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            dim=first["out"].shape[1] // heads,
            inner=first["down"].shape[1],
            vocabulary=self.vocabulary,
            epsilon=epsilon,
            layer=table,
            **{name: _address(weights[name]) for name in _MODEL_WEIGHTS},
        )


@dataclass(slots=True)
class Step:
    """The rows of B sequences, one sequence after the other.

    Attributes:
        start: The first row of each sequence, and then R.
        prefix: How many keys each sequence has in the cache; its rows are written behind them.
        token: The id of each row, length R.
        position: Likewise its logical position.
        tin: Likewise, as in ``TreeMask``, within the row's sequence.
        tout: Likewise.
        wanted: The rows whose logits are asked for.
    """

    start: array[int]
    prefix: array[int]
    token: array[int]
    position: array[int]
    tin: array[int]
    tout: array[int]
    wanted: array[int]


class NativeLibrary:
    """The compiled functions.

    Args:
        path: The library's file.
        seconds: How long compiling it took just now.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self.seconds = seconds
        library = ctypes.CDLL(path)
        self._run = library.decodekit_run
        self._run.argtypes = (
            ctypes.POINTER(_Model),
            ctypes.POINTER(_Step),
            ctypes.c_int,
            ctypes.c_int,
        )
        self._largest = library.decodekit_largest
        self._largest.restype = None
        self._largest.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        self._has_heads_of = library.decodekit_has_heads_of
        self._has_heads_of.argtypes = (ctypes.c_int64, ctypes.c_int)

    def __reduce__(self) -> Any:
        """Return how a copy is made: it is the library that this process has loaded."""
        return native_library, ()

    def has_heads_of(self, dim: int, dtype: torch.dtype) -> bool:
        """Return whether there is a kernel for heads of so many numbers."""
        return bool(self._has_heads_of(dim, DTYPES[dtype]))

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the largest number of each row [R, V] and its first place, both [R].

        A row with NaN has NaN as its largest. None if the rows are of another dtype, on another
        device, not in one piece, or no multiple of ``LANES``: then nothing was done.
        """
        half = DTYPES.get(rows.dtype)
        whole = rows.is_contiguous() and rows.shape[-1] % LANES == 0 and rows.device.type == "cpu"
        if half is None or not whole:
            return None
        best = torch.empty(len(rows), dtype=torch.float32, device="cpu")
        places = torch.empty(len(rows), dtype=torch.int64, device="cpu")
        self._largest(
            rows.data_ptr(), len(rows), rows.shape[-1], half, best.data_ptr(), places.data_ptr()
        )
        return best, places

    def run(self, model: NativeModel, step: Step, *, turns: Tensor, cache: Tensor) -> Tensor:
        """Return the logits [wanted rows, V] in the model's dtype; writes keys and values.

        Args:
            model: The weights.
            step: The rows; the tokens are among those that can be embedded.
            turns: Cosines and signed sines by position, [more than any position, 2 D].
            cache: [2 L, B or more, K, C, D] in one piece: the keys, then the values of each layer.

        Raises:
            GenerationError: There is no memory for the step.
        """
        shape = (len(step.wanted), model.vocabulary)
        logits = torch.empty(shape, dtype=model.dtype, device="cpu")
        given = _Step(
            sequences=len(step.prefix),
            rows=len(step.token),
            wanted=len(step.wanted),
            start=step.start.buffer_info()[0],
            prefix=step.prefix.buffer_info()[0],
            token=step.token.buffer_info()[0],
            position=step.position.buffer_info()[0],
            tin=step.tin.buffer_info()[0],
            tout=step.tout.buffer_info()[0],
            wanted_row=step.wanted.buffer_info()[0],
            turns=turns.data_ptr(),
            cache=cache.data_ptr(),
            slots=cache.shape[1],
            capacity=cache.shape[3],
            logits=logits.data_ptr(),
        )
        half = DTYPES[model.dtype]
        if self._run(model.structure, given, half, torch.get_num_threads()):
            raise GenerationError(
                f"no memory for a step of {len(step.token)} rows; lower max_new_tokens or the "
                "strategy's settings"
            )
        return logits


_loaded: list[NativeLibrary] = []


def native_library() -> NativeLibrary:
    """Return the library, loaded once, and compiled if need be.

    Raises:
        ConfigError: It cannot be compiled or loaded here.
    """
    if _loaded:
        return _loaded[0]
    built = build_library()
    try:
        library = NativeLibrary(str(built.path), built.seconds)
    except (OSError, AttributeError) as error:  # AttributeError: it lacks a function
        with suppress(OSError):
            built.path.unlink()  # the next start compiles it again
        raise ConfigError(
            f"{built.path} cannot be loaded ({error}), so it was removed; try another compiler, "
            "which CXX names",
            key="execution",
            value="native",
        ) from error
    _loaded[:] = [library]
    return library


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr()
