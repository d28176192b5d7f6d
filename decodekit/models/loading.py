"""From a checkpoint directory to a model and a tokenizer, ready for inference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodekit.errors import CheckpointError, ConfigError, ModelSupportError
from decodekit.models.contents import has_tokenizer, missing, single_gguf
from decodekit.models.diagnosis import broken_file
from decodekit.models.gguf_conversion import require_gguf
from decodekit.models.quiet import quiet_transformers
from decodekit.models.reporting import one_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_placement", "load_model"]

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def load_model(
    directory: Path, *, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    The model is in evaluation mode and its parameters need no gradients. On a CPU the weights stay
    mapped from the file where its dtype is the wanted one, so they are read when first used.

    Args:
        directory: A directory as returned by `decodekit.models.checkpoint.resolve_checkpoint`.
        dtype: "float32", "bfloat16", "float16", "float64", or "auto": float32 on a CPU, the
            checkpoint's own elsewhere.
        device: "cpu", "cuda", "cuda:N", "mps", or "auto": "cuda" where there is one, else "cpu".

    Returns:
        The model and the tokenizer.

    Raises:
        ConfigError: The dtype or device is unknown, or the device is not there.
        CheckpointError: A file is missing or broken; the message names it.
        ModelSupportError: The config is of no causal language model that transformers knows.
    """
    import torch

    place = check_placement(dtype=dtype, device=device)
    wanted = "auto" if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and place.type == "cpu":
        wanted = torch.float32
    gguf = _checked(directory)
    source: dict[str, Any] = {"local_files_only": True}
    if gguf is not None:
        source["gguf_file"] = gguf.name
    with quiet_transformers(gguf=gguf is not None):
        tokenizer = _load_tokenizer(directory, source)
        model: Any = _load_weights(directory, {**source, "dtype": wanted})
    return model.to(place).eval().requires_grad_(False), tokenizer


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


def _checked(directory: Path) -> Path | None:
    """Check that all is there before anything is loaded; the GGUF file if that is what is there."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    lacks = missing(directory)
    if lacks is None and not has_tokenizer(directory):
        lacks = "a tokenizer (tokenizer.json or tokenizer.model)"
    if lacks is not None:
        raise CheckpointError(f"{directory} lacks {lacks}")
    gguf = single_gguf(directory)
    if gguf is not None:
        require_gguf(gguf.name)
    return gguf


def _load_tokenizer(directory: Path, source: dict[str, Any]) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, **source)
    except Exception as error:
        raise _explained(directory, error, "its tokenizer cannot be read") from error
    return tokenizer


def _load_weights(directory: Path, source: dict[str, Any]) -> Any:  # its methods lack types
    import torch
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM  # its declared result leaves out the loading info
    try:
        model, info = loader.from_pretrained(directory, output_loading_info=True, **source)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _explained(directory, error, "its weights cannot be read") from error
    absent = sorted(info["missing_keys"])
    if absent:  # transformers would fill these with random numbers and go on
        raise CheckpointError(
            f"{directory} lacks {len(absent)} of the tensors that its config.json asks for, "
            f"the first is {absent[0]}"
        )
    return model


def _explained(
    directory: Path, error: Exception, otherwise: str
) -> CheckpointError | ModelSupportError:
    broken = broken_file(directory)
    if broken is not None:
        return CheckpointError(f"{directory}: {broken}; fetch it again")
    text = str(error)
    if "Unrecognized configuration class" in text or "model type" in text:
        reason = "its config.json is of no causal language model that transformers knows"
        return ModelSupportError(f"{directory}: {reason} ({one_line(error, 120)})", reason=reason)
    if "size mismatch" in text or "ignore_mismatched_sizes" in text:
        otherwise = "its weights have other shapes than its config.json says"
    return CheckpointError(f"{directory}: {otherwise} ({one_line(error)})")
