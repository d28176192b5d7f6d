"""decodekit: draft-free parallel decoding. The same text as token by token, in fewer steps."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from decodekit.errors import DecodekitError

if TYPE_CHECKING:
    from decodekit.cli.profile.step_times import StepTimes
    from decodekit.config.schema import DecoderConfig
    from decodekit.decoder.decoder import Decoder
    from decodekit.decoder.request import Request
    from decodekit.decoder.result import GenerationResult, GenerationStats, TextChunk, TextScore
    from decodekit.decoder.stream import GenerationStream
    from decodekit.hookspecs import hookimpl
    from decodekit.interfaces.component import Component
    from decodekit.interfaces.sampling_params import SamplingParams
    from decodekit.interfaces.tree import TokenTree

    __version__: str

# Loaded when first used: `import decodekit` must stay quick and import neither Hydra nor
# transformers.
_LAZY = {
    "Component": "decodekit.interfaces.component",
    "Decoder": "decodekit.decoder.decoder",
    "DecoderConfig": "decodekit.config.schema",
    "GenerationResult": "decodekit.decoder.result",
    "GenerationStats": "decodekit.decoder.result",
    "GenerationStream": "decodekit.decoder.stream",
    "Request": "decodekit.decoder.request",
    "SamplingParams": "decodekit.interfaces.sampling_params",
    "StepTimes": "decodekit.cli.profile.step_times",
    "TextChunk": "decodekit.decoder.result",
    "TextScore": "decodekit.decoder.result",
    "TokenTree": "decodekit.interfaces.tree",
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
    "StepTimes",
    "TextChunk",
    "TextScore",
    "TokenTree",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("decodekit")
    if name in _LAZY:
        from decodekit.decoder.versions import check_versions

        check_versions()
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
