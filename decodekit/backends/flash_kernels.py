"""Kernels that return an attention output together with its log-sum-exp.

Shapes: B batch, H query heads, K kv heads, R rows, S keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from decodekit.errors import BackendError, in_one_line

__all__ = ["FlashKernel", "select_kernel"]

_Function = Callable[..., Any]
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

    def __init__(self, function: _Function) -> None:
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
            **self._options(),
        )
        return output.transpose(1, 2), log

    def _options(self) -> dict[str, Any]:
        return {"return_softmax_lse": True}


class _CUDA4(_CUDA):
    """``flash_attn_func`` of flash-attn 4.

    Args:
        function: It.
        major: Of the GPU's compute capability.
    """

    def __init__(self, function: _Function, major: int) -> None:
        super().__init__(function)
        self._blackwell = major in (10, 11)

    def check(self, query: Tensor, value: Tensor) -> None:
        super().check(query, value)
        width = query.shape[-1]
        if self._blackwell and 128 < width < 256:
            raise BackendError(
                "backend 'flash' takes heads of up to 128 numbers, or of 256, with flash-attn 4 on "
                f"this GPU, not {width}; use backend=sdpa",
                backend="flash",
            )

    def _options(self) -> dict[str, Any]:
        # It splits the keys over the processors, 0 for as it thinks best, on these only.
        return {"return_lse": True, "num_splits": 0 if self._blackwell else 1}


def select_kernel(device: torch.device) -> FlashKernel:
    """Return the kernel for ``device``.

    Raises:
        BackendError: There is none, or its package is not installed.
    """
    if device.type == "cpu":
        return _CPU()
    if device.type == "cuda":
        return _cuda_kernel(torch.cuda.get_device_capability(device)[0])
    raise BackendError(
        f"backend 'flash' runs on cuda and cpu, not on {device.type}; use backend=sdpa",
        backend="flash",
    )


@lru_cache(maxsize=8)
def _cuda_kernel(major: int) -> FlashKernel:
    """Return the kernel of the flash-attn that suits the GPU best, of those installed.

    flash-attn 3 is for Hopper alone, compute capability 9, and flash-attn 4 for Hopper and
    Blackwell, 10 and 11.
    """
    order = {9: (3, 2, 4), 10: (4, 2), 11: (4, 2)}.get(major, (2,))
    reasons: list[str] = []
    for version in order:
        try:
            function = _flash_attn(version)
        except ImportError as error:
            reasons.append(in_one_line(error))
            continue
        return _CUDA4(function, major) if version == 4 else _CUDA(function)
    raise BackendError(
        f"backend 'flash' needs flash-attn on a GPU ({'; '.join(reasons)}): {_INSTALL}; "
        "or use backend=sdpa",
        backend="flash",
    )


def _flash_attn(version: int) -> _Function:
    """Return the function of a version of flash-attn; each is a package of its own.

    Raises:
        ImportError: It is not installed, or does not work.
    """
    if version == 4:
        from flash_attn.cute import flash_attn_func

        if "return_lse" not in signature(flash_attn_func).parameters:
            raise ImportError("this early flash-attn 4 returns no log-sum-exp")
        return cast(_Function, flash_attn_func)
    if version == 3:
        from flash_attn_interface import flash_attn_with_kvcache
    else:
        from flash_attn import flash_attn_with_kvcache
    return cast(_Function, flash_attn_with_kvcache)


def _check_width(query: Tensor, value: Tensor) -> None:
    if query.shape[-1] != value.shape[-1]:
        raise BackendError(
            f"backend 'flash' takes values as wide as keys, not {value.shape[-1]} and "
            f"{query.shape[-1]}; use backend=eager",
            backend="flash",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
