"""From a weights file to the model and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from decodekit.errors import CheckpointError
from decodekit_example.model import ByteModel

__all__ = ["ByteTokenizer", "load"]

_OWN = Path(__file__).parent / "weights.safetensors"


class ByteTokenizer:
    """Text as UTF-8, a byte a token."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the tokens of a text."""
        return {"input_ids": list(text.encode())}

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of tokens; bytes that are no character become U+FFFD."""
        kept = [token for token in token_ids if token or not skip_special_tokens]
        return bytes(kept).decode("utf-8", "replace")


def load(path: str | None, *, dtype: str, device: str) -> tuple[ByteModel, ByteTokenizer]:
    """Load the weights that come with this package, or others of the same shape.

    Args:
        path: A file ``*.safetensors``; None for the package's own.
        dtype: The name of a torch dtype; ``auto`` is float32.
        device: ``auto`` is a GPU if there is one.

    Raises:
        CheckpointError: The file is not there, or is of another model.
    """
    file = _OWN if path is None else Path(path)
    model = ByteModel()
    try:
        weights: dict[str, Any] = load_file(file)
        model.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{file} has no weights of this model: {reason}") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    wide = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    return model.to(torch.device(device), wide).eval().requires_grad_(False), ByteTokenizer()
