"""The Python interface: ``Decoder``, its requests and results, and building one from settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decodekit.decoder.decoder import Decoder

__all__ = ["Decoder"]


def __getattr__(name: str) -> Any:  # a module of this package alone needs no torch
    if name == "Decoder":
        from decodekit.decoder.decoder import Decoder

        return Decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
