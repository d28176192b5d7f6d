"""From a checkpoint to a model and a tokenizer, ready for inference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodekit.errors import CheckpointError, ConfigError, DecodekitError, ModelSupportError
from decodekit.models.contents import has_tokenizer, missing, missing_of_gguf, single_gguf
from decodekit.models.diagnosis import broken_file
from decodekit.models.gguf_conversion import require_gguf
from decodekit.models.own_code import (
    check_attention,
    check_own_code,
    refusal,
    snapshot_of,
    unused_tokenizer_code,
)
from decodekit.models.quiet import quiet_transformers
from decodekit.models.reporting import Log, one_line, to_stderr

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_placement", "load_model"]

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def load_model(
    place: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    log: Log = to_stderr,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    The model is in evaluation mode and its parameters need no gradients. On a CPU the weights stay
    mapped from the file where its dtype is the wanted one, so they are read when first used.

    Args:
        place: A directory or a GGUF file, as `decodekit.models.checkpoint.resolve_checkpoint`
            returns it. A GGUF file is read by itself, whatever lies beside it.
        dtype: "float32", "bfloat16", "float16", "float64", or "auto": float32 on a CPU, the
            checkpoint's own elsewhere.
        device: "cpu", "cuda", "cuda:N", "mps", or "auto": "cuda" where there is one, else "cpu".
        trust_remote_code: Consent to run the Python files of the directory that its configs name.
        log: Receives one line where a tokenizer's own code was left out.

    Returns:
        The model and the tokenizer.

    Raises:
        ConfigError: The dtype or device is unknown, the device is not there, or the model needs
            code of its own and there is no consent to run it.
        CheckpointError: A file is missing or broken; the message names it.
        ModelSupportError: The config is of no causal language model that transformers knows.
    """
    import torch

    goal = check_placement(dtype=dtype, device=device)
    wanted = "auto" if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and goal.type == "cpu":
        wanted = torch.float32
    gguf = _checked(place)
    with _directory_of(place) as directory, quiet_transformers(gguf=gguf is not None):
        source = _Source(place, directory, gguf, trust_remote_code)
        source.check_code()
        tokenizer = source.tokenizer()
        model: Any = source.model(wanted)
    unused = unused_tokenizer_code(directory, tokenizer)
    if unused is not None:
        log(
            f"{place} brings a tokenizer of its own ({unused}), in whose place "
            f"{type(tokenizer).__name__} was loaded; model.trust_remote_code=true runs it"
        )
    return model.to(goal).eval().requires_grad_(False), tokenizer


def check_placement(*, dtype: str, device: str) -> torch.device:
    """Check where and in what dtype a model is wanted, before it is looked for.

    Returns:
        The device.

    Raises:
        ConfigError: The dtype or device is unknown, or the device is not there.
    """
    place = _device(device)
    if dtype not in _DTYPES:
        raise ConfigError(
            f"dtype {dtype!r} is unknown: choose one of {', '.join(_DTYPES)}",
            key="dtype",
            value=dtype,
        )
    if dtype == "float64" and place.type == "mps":
        raise ConfigError("dtype float64 is not available on mps", key="dtype", value=dtype)
    return place


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    known = kind in ("cpu", "cuda", "mps") and (not index or (kind == "cuda" and index.isdigit()))
    if not known or name.endswith(":"):
        problem = "is unknown: choose one of auto, cpu, cuda, cuda:N, mps"
    elif kind == "cuda" and not torch.cuda.is_available():
        reason = "finds no GPU" if torch.version.cuda else "is a build without CUDA"
        problem = f"is not available: this torch {reason}; set device=cpu"
    elif index and int(index) >= torch.cuda.device_count():
        problem = f"is not available: the last GPU is cuda:{torch.cuda.device_count() - 1}"
    elif kind == "mps" and not torch.backends.mps.is_available():
        problem = "is not available: it needs a Mac with an Apple GPU; set device=cpu"
    else:
        return torch.device(name)
    raise ConfigError(f"device {name!r} {problem}", key="device", value=name)


def _checked(place: Path) -> Path | None:
    """Check that all is there before anything is loaded; the GGUF file if that is what is there."""
    lacks = None
    if place.is_file() and place.suffix == ".gguf":
        gguf: Path | None = place
        lacks = missing_of_gguf(place)
    elif not place.is_dir():
        raise CheckpointError(f"{place} is not a directory")
    else:
        lacks = missing(place)
        if lacks is None and not has_tokenizer(place):
            lacks = "a tokenizer (tokenizer.json or tokenizer.model)"
        gguf = single_gguf(place) if lacks is None else None
    if lacks is not None:
        raise CheckpointError(f"{place} lacks {lacks}")
    if gguf is not None:
        require_gguf(gguf.name)
    return gguf


@contextmanager
def _directory_of(place: Path) -> Iterator[Path]:
    """The directory to load from: for a file one with nothing else in it.

    With a GGUF file ``transformers`` reads the tokenizer and the templates of its directory, too,
    which may be another model's.
    """
    if place.is_dir():
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="decodekit-") as alone:
        try:
            (Path(alone) / place.name).symlink_to(place.resolve())
        except OSError:  # not on every system may a user make links
            yield place.parent
        else:
            yield Path(alone)


@dataclass(frozen=True, slots=True)
class _Source:
    """What is loaded, and with what consent.

    Attributes:
        place: As the user gave it, for messages.
        directory: Where ``transformers`` looks.
        gguf: The GGUF file that stands for the whole model, or None.
        trusted: Whether the directory's own code may run.
    """

    place: Path
    directory: Path
    gguf: Path | None
    trusted: bool

    def check_code(self) -> None:
        """Check what the configs name as code, before any of it is imported."""
        check_attention(self.directory)
        if self.trusted:
            check_own_code(self.directory)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"local_files_only": True}
        if self.gguf is not None:
            options["gguf_file"] = self.gguf.name
        snapshot = snapshot_of(self.directory)
        if self.trusted and snapshot is not None:
            # A config may name its files by the repo, where transformers takes the newest.
            options["code_revision"] = snapshot[1]
        return options

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer."""
        from transformers import AutoTokenizer

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.directory, trust_remote_code=self.trusted, **self._options()
            )
        except Exception as error:
            raise self._explained(error, "its tokenizer cannot be read") from error
        return tokenizer

    def model(self, dtype: Any) -> Any:  # its methods lack types
        """Load the model; every tensor is there and has its shape."""
        import torch

        try:
            model, info = self._weights(dtype)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._explained(error, "its weights cannot be read") from error
        absent = sorted(info["missing_keys"])
        if absent:  # transformers would fill these with random numbers and go on
            raise CheckpointError(
                f"{self.place} lacks {len(absent)} of the tensors that its config.json asks for, "
                f"the first is {absent[0]}"
            )
        return model

    def _weights(self, dtype: Any, **more: Any) -> tuple[Any, dict[str, Any]]:
        """Return the model, and what its loader noticed."""
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM  # its declared result leaves out the loading info
        loaded: tuple[Any, dict[str, Any]] = loader.from_pretrained(
            self.directory,
            trust_remote_code=self.trusted,
            dtype=dtype,
            output_loading_info=True,
            **self._options(),
            **more,
        )
        return loaded

    def _other_shape(self) -> str:
        """Name the first tensor of another shape, which the loader's error leaves to a log."""
        otherwise = "its weights have other shapes than its config.json says"
        try:
            _, info = self._weights("auto", ignore_mismatched_sizes=True)
        except Exception:  # the second failure; what is known of the first has to do
            return otherwise
        other = sorted(info["mismatched_keys"])
        if not other:
            return otherwise
        name, found, wanted = other[0]
        more = f" (and {len(other) - 1} more like it)" if other[1:] else ""
        return (
            f"{name} has the shape {list(found)} in the weights and {list(wanted)} by its "
            f"config.json{more}"
        )

    def _explained(self, error: Exception, otherwise: str) -> DecodekitError:
        broken = broken_file(self.directory)
        if broken is not None:
            return CheckpointError(f"{self.place}: {broken}; fetch it again")
        text = str(error)
        if "trust_remote_code" in text or "requires you to execute custom code" in text:
            return refusal(self.directory, trusted=self.trusted)
        if "size mismatch" in text or "ignore_mismatched_sizes" in text:
            return CheckpointError(f"{self.place}: {self._other_shape()}")
        if "Unrecognized configuration class" in text or "model type" in text:
            reason = "its config.json is of no causal language model that transformers knows"
            return ModelSupportError(
                f"{self.place}: {reason} ({one_line(error, 120)})", reason=reason
            )
        return CheckpointError(f"{self.place}: {otherwise} ({one_line(error)})")
