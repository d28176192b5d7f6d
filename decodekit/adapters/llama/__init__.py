"""The ``llama`` adapter: a lean forward pass of our own for checkpoints of the LLaMA family."""

from decodekit.adapters.llama.adapter import LlamaAdapter
from decodekit.adapters.llama.support import obstacle

__all__ = ["LlamaAdapter", "obstacle"]
