"""decodekit: draft-free parallel decoding. The same text as token by token, in fewer steps."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decodekit.errors import DecodekitError

if TYPE_CHECKING:
    from decodekit.config import DecoderConfig
    from decodekit.decoder import Decoder
    from decodekit.hookspecs import hookimpl
    from decodekit.params import SamplingParams
    from decodekit.registry import Component
    from decodekit.request import Request
    from decodekit.result import GenerationResult, GenerationStats, TextChunk, TextScore
    from decodekit.stream import GenerationStream
    from decodekit.tree import TokenTree

__version__ = "0.1.0"

# Loaded when first used: `import decodekit` must stay quick and import neither Hydra nor
# transformers.
_LAZY = {
    "Component": "decodekit.registry",
    "Decoder": "decodekit.decoder",
    "DecoderConfig": "decodekit.config",
    "GenerationResult": "decodekit.result",
    "GenerationStats": "decodekit.result",
    "GenerationStream": "decodekit.stream",
    "Request": "decodekit.request",
    "SamplingParams": "decodekit.params",
    "TextChunk": "decodekit.result",
    "TextScore": "decodekit.result",
    "TokenTree": "decodekit.tree",
    "hookimpl": "decodekit.hookspecs",
}

__all__ = [
    "Component",
    "DecodekitError",
    "Decoder",
    "DecoderConfig",
    "GenerationResult",
    "GenerationStats",
    "GenerationStream",
    "Request",
    "SamplingParams",
    "TextChunk",
    "TextScore",
    "TokenTree",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from decodekit.versions import check_versions

        check_versions()
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
