"""Kernels that return an attention output together with its log-sum-exp.

Shapes: B batch, H query heads, K kv heads, R rows, S keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from decodekit.errors import BackendError

__all__ = ["FlashKernel", "select_kernel"]

_INSTALL = "pip install flash-attn --no-build-isolation"


class FlashKernel(Protocol):
    """Unmasked or causal attention over a run of keys.

    Attributes:
        windows: Whether a causal call may have a ``window``, and rows that end where the keys end
            rather than begin where they begin.
        softcaps: Whether ``softcap`` is supported.
    """

    windows: bool
    softcaps: bool

    def check(self, query: Tensor, value: Tensor) -> None:
        """Refuse what the kernel cannot take.

        Raises:
            BackendError: With the reason.
        """
        ...

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [B, H, R, D] and its log-sum-exp [B, H, R].

        Args:
            query: [B, H, R, D], the last stride 1; as for keys and values.
            key: [B, K, S, D], S at least 1; H is a multiple of K.
            value: [B, K, S, D].
            scale: Factor on the scores.
            causal: Row ``r`` sees the first ``r + 1`` keys or, with ``windows``, all but the last
                ``R - 1 - r``.
            window: Keys that a row of a causal call sees at most, its own the last.
            softcap: As for ``AttentionBackend.attend``.
        """
        ...


class _CPU:
    """torch's own flash attention for CPUs: grouped heads, strided views, any head dim."""

    windows = False
    softcaps = False

    def check(self, query: Tensor, value: Tensor) -> None:
        _check_width(query, value)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        output, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=causal, scale=scale
        )
        return output, log


class _CUDA:
    """``flash_attn_with_kvcache`` of flash-attn 2 or 3, which have these arguments in common.

    Args:
        function: It.
    """

    windows = True
    softcaps = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def check(self, query: Tensor, value: Tensor) -> None:
        _check_width(query, value)
        width = query.shape[-1]
        if width > 256 or width % 8:
            raise BackendError(
                f"backend 'flash' takes heads of up to 256 numbers, a multiple of 8, not {width}; "
                "use backend=sdpa",
                backend="flash",
            )
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise BackendError(
                f"backend 'flash' takes float16 or bfloat16 on a GPU, not {_name(query.dtype)}; "
                "use dtype=bfloat16 or backend=sdpa",
                backend="flash",
            )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        # Rows before heads here, and for the kernel's window the row's own key does not count.
        output, log, *_ = self._function(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            softmax_scale=scale,
            causal=causal,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
            return_softmax_lse=True,
        )
        return output.transpose(1, 2), log


def select_kernel(device: torch.device) -> FlashKernel:
    """Return the kernel for ``device``.

    Raises:
        BackendError: There is none, or its package is not installed.
    """
    if device.type == "cpu":
        return _CPU()
    if device.type == "cuda":
        return _CUDA(_flash_attn())
    raise BackendError(
        f"backend 'flash' runs on cuda and cpu, not on {device.type}; use backend=sdpa",
        backend="flash",
    )


@lru_cache(maxsize=1)
def _flash_attn() -> Callable[..., Any]:
    """Return ``flash_attn_with_kvcache`` of flash-attn 3 where it is installed, else of 2."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        try:
            from flash_attn import flash_attn_with_kvcache
        except ImportError as error:
            reason = " ".join(str(error).split())
            raise BackendError(
                f"backend 'flash' needs flash-attn on a GPU ({reason}): {_INSTALL}; "
                "or use backend=sdpa",
                backend="flash",
            ) from error
    function: Callable[..., Any] = flash_attn_with_kvcache
    return function


def _check_width(query: Tensor, value: Tensor) -> None:
    if query.shape[-1] != value.shape[-1]:
        raise BackendError(
            f"backend 'flash' takes values as wide as keys, not {value.shape[-1]} and "
            f"{query.shape[-1]}; use backend=eager",
            backend="flash",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
