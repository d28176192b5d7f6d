"""The ``hf`` adapter: any supported ``transformers`` causal language model."""

from decodekit.adapters.hf.adapter import HFAdapter

__all__ = ["HFAdapter"]
