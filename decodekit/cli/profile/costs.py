"""What a step has to read and to compute at least, counted from a model's weights and settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from decodekit.interfaces.plan import StepPlan

__all__ = ["ModelCosts", "count_costs"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What a step of one sequence needs, whatever its kernels are.

    Not counted: activations, the keys and values of the step's own rows, looking up embeddings, and
    all arithmetic but matrix products.

    Attributes:
        weight_bytes: Of all weights that every step reads; those of an embedding only where the
            output head shares them.
        matrix_weights: Elements of the matrices that every row is multiplied with.
        windows: The sliding window of each layer, None for full attention.
        heads: H, query heads.
        kv_heads: K, heads of keys and values.
        head_dim: D.
        element_bytes: Of an element of keys and values.
    """

    weight_bytes: int
    matrix_weights: int
    windows: tuple[int | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    def bytes_of(self, plan: StepPlan) -> int:
        """Return the bytes that the step reads: the weights once, keys and values of its prefix."""
        keys = sum(
            plan.prefix if window is None else min(plan.prefix, window - 1)
            for window in self.windows
        )
        return self.weight_bytes + 2 * self.kv_heads * self.head_dim * self.element_bytes * keys

    def operations_of(self, plan: StepPlan) -> int:
        """Return the multiplications and additions of the step's matrix products.

        A row at position p attends to p + 1 keys, its own included, and a layer's window is the
        most that it sees.
        """
        seen = sum(
            position + 1 if window is None else min(position + 1, window)
            for window in self.windows
            for position in plan.positions
        )
        return 2 * self.matrix_weights * plan.rows + 4 * self.heads * self.head_dim * seen


def count_costs(model: Any) -> tuple[ModelCosts | None, str | None]:
    """Return what a step of ``model`` costs, or None and the reason why that is not counted.

    Args:
        model: A model of ``transformers``, before its layers are packed.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings"):
        return None, "the model is none of transformers"
    config: Any = model.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if any(getattr(config, name, None) for name in _EXPERTS):
        return None, "which of its experts a step reads depends on the tokens"
    if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None):
        return None, "its layers do not each keep plain keys and values"
    weights = _weights_of(model)
    for one in weights:
        if type(one) is not nn.Parameter or not one.is_floating_point():
            return None, f"it has weights of {type(one).__name__}, {one.dtype}"
    windows, heads = _windows_of(config), getattr(config, "num_attention_heads", None)
    if windows is None or not isinstance(heads, int) or hasattr(config, "num_kv_heads"):
        return None, "its configuration does not say how its layers attend"
    return (
        ModelCosts(
            weight_bytes=sum(one.numel() * one.element_size() for one in weights),
            matrix_weights=sum(one.numel() for one in weights if one.ndim > 1),
            windows=windows,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            element_bytes=weights[0].element_size(),
        ),
        None,
    )


def _weights_of(model: nn.Module) -> list[Tensor]:
    """Return the weights that every step reads, each once."""
    looked_up = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
    }
    head = model.get_output_embeddings()  # type: ignore[operator]
    multiplied = {id(weight) for weight in head.parameters()} if head is not None else set()
    return [
        weight
        for weight in model.parameters()
        if id(weight) in multiplied or id(weight) not in looked_up
    ]


def _windows_of(config: Any) -> tuple[int | None, ...] | None:
    """Return each layer's window; None if there are layers of another kind."""
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * layers
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
