"""The laws of an attention backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.backends.eager import EagerBackend
from decodekit.errors import BackendError
from decodekit.interfaces.backend import AttentionBackend
from decodekit.interfaces.mask import TreeMask
from decodekit.interfaces.plan import StepPlan
from decodekit.testing.laws import law, random_tree

__all__ = ["check_backend"]

_TOLERANCES = {
    # dtype: (atol, rtol), for values of size about 1
    torch.float64: (1e-10, 1e-10),
    torch.float32: (5e-6, 5e-5),
    torch.float16: (4e-3, 2e-2),
    torch.bfloat16: (3e-2, 3e-2),
}
_LAYOUTS = ((1, 1), (4, 4), (4, 2), (6, 2), (8, 1))  # query heads, kv heads
_WINDOWS = (None, 1, 3, 17)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"softcap": 2.0},
    {"sinks": True},
    {"softcap": 2.0, "sinks": True},
)
_CASES = tuple((window, options) for window in _WINDOWS for options in _OPTIONS)
_FEW_CASES = tuple(
    (window, options)
    for window, options in _CASES
    if (window is None and len(options) < 2) or (window == 3 and not options)
)
"""What a kernel does with a window, softcap and sinks at once it does for every layout of heads."""


def check_backend(
    backend: AttentionBackend,
    *,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    head_dim: int = 16,
    tolerances: dict[torch.dtype, tuple[float, float]] | None = None,
    seed: int = 0,
) -> None:
    """Check that a backend equals ``eager``, or refuses with a ``BackendError``.

    Random trees after prefixes of several lengths, sliding windows, grouped query heads, ragged
    batches, softcap and sinks. What it refuses is its own business, as long as it says so by a
    ``BackendError`` with its name; a plain tree under full attention it must run in one of
    ``dtypes``.

    Args:
        backend: What is checked.
        device: Where it runs.
        dtypes: Of queries, keys and values.
        head_dim: D.
        tolerances: ``(atol, rtol)`` by dtype, instead of the usual ones.
        seed: Of masks and numbers.

    Raises:
        AssertionError: A law is broken; which, and on what input.
    """
    law(
        isinstance(backend, AttentionBackend), "a backend has name, lower and attend", repr(backend)
    )
    name = backend.name
    law(isinstance(name, str) and bool(name), "a backend says its name", f"it says {name!r}")
    suite = _Suite(backend, torch.device(device), head_dim, {**_TOLERANCES, **(tolerances or {})})
    choose = random.Random(seed)
    plain = 0
    for dtype in dtypes:
        for layout in _LAYOUTS:
            for window, options in _CASES if layout == (4, 2) else _FEW_CASES:
                for masks in _batches(choose):
                    ran = suite.compare(masks, layout, dtype, window, options, choose)
                    plain += ran and window is None and not options
    for window in (None, 17):  # more rows and keys than one block of many kernels has
        suite.compare([_plan(choose, 140, 1, 34)], (2, 1), dtypes[0], window, {}, choose)
    law(plain > 0, "full attention over a tree is supported", f"{name!r} refused all of it")


def _batches(choose: random.Random) -> list[list[TreeMask]]:
    """Return masks of single sequences, of two of one shape, and of a ragged batch."""
    shape = (choose.randrange(40), choose.randrange(1, 4), choose.randrange(3, 12))
    return [
        [_plan(choose, 0, 7, 0)],
        [_plan(choose, choose.randrange(1, 30), 1, 0)],
        [_plan(choose, *shape), _plan(choose, *shape)],
        [_plan(choose, 4, 1, 7), _plan(choose, 0, 5, 0), _plan(choose, 12, 1, 2)],
    ]


def _plan(choose: random.Random, prefix: int, pending: int, nodes: int) -> TreeMask:
    return StepPlan(prefix, (0,) * pending, random_tree(choose, nodes, 2)).mask()


class _Suite:
    """One backend, and how its results are compared with those of ``eager``."""

    def __init__(
        self,
        backend: AttentionBackend,
        device: torch.device,
        head_dim: int,
        tolerances: dict[torch.dtype, tuple[float, float]],
    ) -> None:
        self._backend = backend
        self._device = device
        self._dim = head_dim
        self._tolerances = tolerances

    def compare(
        self,
        masks: list[TreeMask],
        layout: tuple[int, int],
        dtype: torch.dtype,
        window: int | None,
        options: dict[str, Any],
        choose: random.Random,
    ) -> bool:
        """Compare one pass; return whether the backend ran it."""
        where = (
            f"{layout[0]} query heads and {layout[1]} kv heads, {dtype}, window {window}, "
            f"{', '.join(options) or 'no options'}, masks {masks}"
        )
        states = self._states(masks, layout, dtype, choose.randrange(2**31))
        if "sinks" in options:
            options = {
                **options,
                "sinks": torch.linspace(-1, 1, layout[0], device=self._device).to(dtype),
            }
        copies = tuple(state.clone() for state in states)
        try:
            lowered = self._lower(self._backend, masks, window, dtype)
            actual = self._attend(self._backend, states, lowered, options)
        except BackendError as error:
            named = error.backend == self._backend.name
            law(named, "a refusal names its backend", f"BackendError.backend is {error.backend!r}")
            return False
        except Exception as error:
            raise AssertionError(
                "broken law: what is not supported is refused with a BackendError; it raised "
                f"{type(error).__name__}: {error}; {where}"
            ) from error
        for state, copy in zip(states, copies, strict=True):
            law(torch.equal(state, copy), "query, key and value are not written to", where)
        eager = EagerBackend()
        expected = self._attend(eager, states, self._lower(eager, masks, window, dtype), options)
        self._close(actual, expected, masks, "it equals eager", where)
        # Layers with another window have other lowered masks, which are made before this is used.
        chains = [StepPlan(mask.prefix, (0,) * mask.rows).mask() for mask in masks]
        self._lower(self._backend, chains, window, dtype)
        again = self._attend(self._backend, states, lowered, options)
        self._close(again, actual, masks, "a lowered mask serves every layer", where)
        self._check_hidden(masks, states, lowered, options, actual, window, where)
        return True

    def _check_hidden(
        self,
        masks: list[TreeMask],
        states: tuple[Tensor, Tensor, Tensor],
        lowered: Any,
        options: dict[str, Any],
        clean: Tensor,
        window: int | None,
        where: str,
    ) -> None:
        """Check that a key which no row sees but the last one moves no other row."""
        query, key, value = (state.clone() for state in states)
        for index, mask in enumerate(masks):
            last = mask.prefix + mask.rows - 1
            key[index, :, last], value[index, :, last] = 50.0, -50.0
        moved = self._attend(self._backend, (query, key, value), lowered, options)
        for index, mask in enumerate(masks):
            last = mask.prefix + mask.rows - 1
            blind = [r for r in range(mask.rows) if not mask.sees(r, last, window=window)]
            law(
                self._is_close(moved[index, blind], clean[index, blind]),
                "what a row must not see does not move it",
                f"key {last} of sequence {index}; {where}",
            )

    def _states(
        self, masks: list[TreeMask], layout: tuple[int, int], dtype: torch.dtype, seed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = max(mask.rows for mask in masks)
        keys = max(mask.prefix + mask.rows for mask in masks)
        generator = torch.Generator().manual_seed(seed)

        # An adapter hands over the used part of a longer cache, so a head's rows are further apart.
        spare = 3 if len(masks) > 1 else 0

        def normal(heads: int, length: int) -> Tensor:
            shape = (len(masks), heads, length + spare, self._dim)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(self._device, dtype)[:, :, :length]

        return normal(layout[0], rows), normal(layout[1], keys), normal(layout[1], keys)

    def _lower(
        self,
        backend: AttentionBackend,
        masks: list[TreeMask],
        window: int | None,
        dtype: torch.dtype,
    ) -> Any:
        return backend.lower(masks, window=window, dtype=dtype, device=self._device)

    def _attend(
        self,
        backend: AttentionBackend,
        states: tuple[Tensor, Tensor, Tensor],
        lowered: Any,
        options: dict[str, Any],
    ) -> Tensor:
        # Not the usual D**-0.5, which a kernel would take by itself.
        return backend.attend(*states, lowered, scale=0.8 * self._dim**-0.5, **options)

    def _is_close(self, actual: Tensor, expected: Tensor) -> bool:
        atol, rtol = self._tolerances[expected.dtype]
        return torch.allclose(actual.double(), expected.double(), atol=atol, rtol=rtol)

    def _close(
        self, actual: Tensor, expected: Tensor, masks: list[TreeMask], name: str, where: str
    ) -> None:
        law(
            actual.shape == expected.shape and actual.dtype == expected.dtype,
            "the output is [B, R, H, D] in the dtype of the query",
            f"it is {list(actual.shape)} in {actual.dtype}, not {list(expected.shape)}; {where}",
        )
        law(bool(torch.isfinite(actual).all()), "the output is finite, padding included", where)
        for index, mask in enumerate(masks):  # rows that pad a sequence are thrown away
            mine, theirs = actual[index, : mask.rows], expected[index, : mask.rows]
            gap = float((mine.double() - theirs.double()).abs().max())
            law(
                self._is_close(mine, theirs), name, f"sequence {index} is off by {gap:.3g}; {where}"
            )
