"""From a GGUF file to a plain checkpoint in float32 safetensors."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

from decodekit.errors import CheckpointError
from decodekit.models.quiet import quiet_transformers
from decodekit.models.reporting import one_line

__all__ = ["convert_gguf", "require_gguf"]


def require_gguf(what: str) -> None:
    """Check that GGUF files can be read.

    Args:
        what: The file or model, for the message.

    Raises:
        CheckpointError: A package is missing; the message has the pip line.
    """
    lacking = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if lacking:
        raise CheckpointError(
            f"{what} is a GGUF file, and reading it needs `pip install {' '.join(lacking)}`"
        )


def convert_gguf(gguf: Path, output: Path) -> None:
    """Write the model and tokenizer of a GGUF file as float32 safetensors.

    Args:
        gguf: The file.
        output: An empty directory; afterwards it has config, generation config, weights and
            tokenizer, and says nothing of GGUF any more.

    Raises:
        CheckpointError: The file cannot be converted.
    """
    require_gguf(gguf.name)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers(bars=sys.stderr.isatty(), gguf=True):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(
                gguf.parent, gguf_file=gguf.name, trust_remote_code=False
            )
            # A model from a GGUF refuses save_pretrained because it counts as quantised. Its
            # weights are plain by now, so they move, uncopied, into a model that never was.
            config = copy.deepcopy(model.config)
            if hasattr(config, "quantization_config"):  # from transformers 5.17 on
                del config.quantization_config
            with torch.device("meta"):
                plain = type(model)(config)
            plain.load_state_dict(model.state_dict(), assign=True)
            plain.tie_weights()
            plain.generation_config = model.generation_config
            plain.save_pretrained(output)
            tokenizer.save_pretrained(output)
        except OSError:
            raise  # a full disk is the cache's to explain
        except Exception as error:
            raise CheckpointError(
                f"{gguf.name} cannot be converted: {one_line(error)}", model=gguf.stem
            ) from error
