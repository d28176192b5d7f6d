"""Tiny random models of every architecture that the ``hf`` adapter is tested with.

``docs/architectures.md`` holds the table made from this; to write it anew::

    python -m tests.support.zoo
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "DOCS",
    "REFUSED",
    "ROPES",
    "VARIANTS",
    "VOCABULARY",
    "WINDOW",
    "ZOO",
    "Kind",
    "table",
]

VOCABULARY = 64
WINDOW = 12
DOCS = Path(__file__).parents[2] / "docs" / "architectures.md"

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # else a random model likes to repeat its input
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One architecture, or one variant of it.

    Attributes:
        title: Its name in the table.
        type: ``model_type`` in transformers.
        settings: What its tiny configuration says beside the common shape.
        special: What the adapter has to get right.
        sdpa: Whether ``backend=sdpa`` can do it.
        shape: The common shape.
        seed: Makes weights whose texts do not repeat one token for ever.
    """

    title: str
    type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    special: str = ""
    sdpa: bool = True
    shape: Mapping[str, Any] = field(default_factory=lambda: _SHAPE)
    seed: int = 0

    def config(self) -> Any:
        """Return the tiny configuration."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.type, **{**self.shape, **self.settings})


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


_SHORT = {"original_max_position_embeddings": 32}
ROPES = {
    "linear": _rope("linear", factor=4.0),
    "llama3": _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **_SHORT),
    "yarn": _rope("yarn", factor=4.0, **_SHORT),
}
_LONG = {
    **_SHORT,
    **_rope("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, factor=4.0, **_SHORT),
}

ZOO: dict[str, Kind] = {
    "llama": Kind(title="LLaMA 1, 2, 3, CodeLlama, SmolLM2", type="llama"),
    **{
        f"llama-{name}": Kind(
            title=f"LLaMA, RoPE scaling `{name}`", type="llama", settings=ROPES[name]
        )
        for name in ROPES
    },
    "mistral": Kind(
        title="Mistral",
        type="mistral",
        settings={"sliding_window": WINDOW},
        special="sliding window in every layer",
    ),
    "mixtral": Kind(
        title="Mixtral",
        type="mixtral",
        settings={"sliding_window": WINDOW, "num_local_experts": 4, **_EXPERTS},
        special="experts, sliding window",
    ),
    "qwen2": Kind(
        title="Qwen2, Qwen2.5",
        type="qwen2",
        settings={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        special="biases; sliding window in the upper layers",
    ),
    "qwen3": Kind(
        title="Qwen3", type="qwen3", settings={"head_dim": 16}, special="norms of queries and keys"
    ),
    "qwen3_moe": Kind(
        title="Qwen3-MoE",
        type="qwen3_moe",
        seed=1,
        settings={"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 16, **_EXPERTS},
        special="experts",
    ),
    "jetmoe": Kind(
        title="JetMoE",
        type="jetmoe",
        settings={"kv_channels": 8, "num_local_experts": 4, **_EXPERTS},
        special="experts in attention too",
    ),
    "gemma": Kind(title="Gemma", type="gemma", settings={"head_dim": 16}),
    "gemma2": Kind(
        title="Gemma 2",
        type="gemma2",
        settings={"head_dim": 8, "sliding_window": WINDOW},
        special="softcap, window in every other layer",
        sdpa=False,
    ),
    "gemma3": Kind(
        title="Gemma 3 (text)",
        type="gemma3_text",
        settings={"head_dim": 16, "query_pre_attn_scalar": 16, **_ALTERNATING},
        special="two RoPE bases, alternating windows",
    ),
    "phi3": Kind(
        title="Phi-3, Phi-4",
        type="phi3",
        settings={"sliding_window": WINDOW},
        special="fused projections, sliding window",
    ),
    "phi3-longrope": Kind(
        title="Phi-3 with LongRoPE",
        type="phi3",
        settings=_LONG,
        special="keys anew at the border; guesses stop before it",
    ),
    "phimoe": Kind(
        title="Phi-3.5-MoE with LongRoPE",
        type="phimoe",
        settings={
            "num_local_experts": 4,
            **_EXPERTS,
            **_LONG,
            "rope_parameters": {
                **_LONG["rope_parameters"],
                "short_mscale": 1.2,
                "long_mscale": 1.7,
            },
        },
        special="experts; LongRoPE that scales long texts otherwise",
    ),
    "phi": Kind(title="Phi-1, Phi-2", type="phi", special="partial RoPE"),
    "olmo2": Kind(title="OLMo 2", type="olmo2", seed=2),
    "olmo3": Kind(
        title="OLMo 3", type="olmo3", seed=2, settings=_ALTERNATING, special="alternating windows"
    ),
    "starcoder2": Kind(
        title="StarCoder2",
        type="starcoder2",
        settings={"sliding_window": WINDOW},
        special="sliding window",
    ),
    "gpt2": Kind(title="GPT-2", type="gpt2", shape=_GPT, special="learned positions"),
    "gpt_bigcode": Kind(
        title="GPT-BigCode, StarCoder",
        type="gpt_bigcode",
        shape=_GPT,
        special="learned positions, one kv head",
    ),
    "gptj": Kind(title="GPT-J", type="gptj", shape=_GPT, settings={"rotary_dim": 4}),
    "gpt_neox": Kind(title="GPT-NeoX, Pythia", type="gpt_neox", seed=1),
    "opt": Kind(
        title="OPT",
        type="opt",
        settings={"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0},
        special="learned positions with an offset",
    ),
    "falcon": Kind(
        title="Falcon",
        type="falcon",
        settings={"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
        special="the model's own attention with our mask",
    ),
    "falcon-7b": Kind(
        title="Falcon 7B",
        type="falcon",
        settings={"alibi": False, "multi_query": True, "parallel_attn": True},
        special="the model's own attention with our mask, one kv head",
    ),
    "cohere": Kind(title="Cohere Command R", type="cohere", special="interleaved RoPE"),
    "cohere2": Kind(
        title="Cohere Command R7B",
        type="cohere2",
        settings=_ALTERNATING,
        special="layers without RoPE, alternating windows",
    ),
    "stablelm": Kind(title="StableLM", type="stablelm", special="partial RoPE"),
    "nemotron": Kind(title="Nemotron", type="nemotron", special="partial RoPE"),
    "granite": Kind(title="Granite", type="granite"),
    "glm4": Kind(
        title="GLM-4",
        type="glm4",
        settings={"head_dim": 16, "eos_token_id": []},
        special="partial RoPE",
    ),
    "smollm3": Kind(
        title="SmolLM3",
        type="smollm3",
        settings={"no_rope_layers": [1, 1, 1, 0]},
        special="layers without RoPE",
    ),
    "helium": Kind(title="Helium", type="helium", settings={"head_dim": 8}),
    "exaone4": Kind(
        title="EXAONE 4", type="exaone4", settings=_ALTERNATING, special="alternating windows"
    ),
    "gpt_oss": Kind(
        title="GPT-OSS",
        type="gpt_oss",
        settings={"head_dim": 16, "num_local_experts": 4, "sliding_window": WINDOW, **_EXPERTS},
        special="sinks, experts, alternating windows",
        sdpa=False,
    ),
    "deepseek_v2": Kind(
        title="DeepSeek-V2",
        type="deepseek_v2",
        settings={**_MLA, **_EXPERTS},
        special="MLA: keys and values of different widths; experts",
    ),
    "deepseek_v3": Kind(
        title="DeepSeek-V3, R1",
        type="deepseek_v3",
        settings={**_MLA, **_EXPERTS},
        special="MLA: keys and values of different widths; experts",
    ),
}

VARIANTS: dict[str, Kind] = {
    # One feature of the LLaMA family each, beside those of the table.
    "llama-one-kv-head": Kind(title="", type="llama", settings={"num_key_value_heads": 1}),
    "llama-no-groups": Kind(title="", type="llama", settings={"num_key_value_heads": 4}),
    "llama-wide-heads": Kind(title="", type="llama", settings={"head_dim": 16}),
    "llama-biased": Kind(
        title="", type="llama", settings={"attention_bias": True, "mlp_bias": True}
    ),
    "llama-tied": Kind(title="", type="llama", settings={"tie_word_embeddings": True}),
    "llama-gelu": Kind(title="", type="llama", settings={"hidden_act": "gelu_pytorch_tanh"}),
    "mistral-full": Kind(title="", type="mistral", settings={"sliding_window": None}),
    "qwen2-full": Kind(title="", type="qwen2"),
}

_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}

REFUSED: dict[str, tuple[Kind, str]] = {
    "dynamic RoPE": (
        Kind(title="", type="llama", settings=_rope("dynamic", factor=4.0)),
        "its 'dynamic' RoPE changes with the longest position of a pass",
    ),
    "Falcon with ALiBi": (
        Kind(title="", type="falcon", settings={"alibi": True}),
        "its attention cannot be replaced from outside",
    ),
    "BLOOM": (
        Kind(title="", type="bloom", shape=_SMALL, settings={"n_head": 4, "n_layer": 2}),
        "its attention cannot be replaced from outside",
    ),
    "MPT": (
        Kind(
            title="",
            type="mpt",
            shape={"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4},
        ),
        "its attention cannot be replaced from outside",
    ),
    "Mamba": (Kind(title="", type="mamba", shape=_SMALL), "it keeps a recurrent state"),
    "Mamba 2": (
        Kind(
            title="",
            type="mamba2",
            shape=_SMALL,
            settings={"num_heads": 4, "head_dim": 16, "n_groups": 1},
        ),
        "it keeps a recurrent state",
    ),
    "RWKV": (Kind(title="", type="rwkv", shape=_SMALL), "it keeps a recurrent state"),
    "xLSTM": (
        Kind(title="", type="xlstm", shape=_SMALL, settings={"num_heads": 4}),
        "it keeps a recurrent state",
    ),
    "Jamba": (
        Kind(title="", type="jamba", settings={"num_experts": 2}),
        "it keeps a recurrent state",
    ),
    "Granite 4 hybrid": (
        Kind(
            title="",
            type="granitemoehybrid",
            settings={"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8},
        ),
        "it keeps a recurrent state",
    ),
    "RecurrentGemma": (
        Kind(title="", type="recurrent_gemma"),
        "it keeps a recurrent state",
    ),
    "Qwen3-Next": (
        Kind(title="", type="qwen3_next", settings={"head_dim": 16}),
        "it keeps a recurrent state",
    ),
    "LFM2": (
        Kind(title="", type="lfm2", settings={"layer_types": ["conv", "full_attention"] * 2}),
        "it has layers of kind conv",
    ),
    "MiniMax-01": (
        Kind(
            title="",
            type="minimax",
            settings={"layer_types": ["linear_attention", "full_attention"] * 2},
        ),
        "it has layers of kind linear_attention",
    ),
    "Qwen2-MoE with a window": (
        Kind(
            title="",
            type="qwen2_moe",
            settings={
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "num_experts": 4,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                **_EXPERTS,
            },
        ),
        "the window of its masks has 12 positions, but attention is told of no end",
    ),
    "the decoder of BART": (
        Kind(
            title="",
            type="bart",
            shape={"vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2},
            settings={"decoder_attention_heads": 4, "decoder_ffn_dim": 48, "is_decoder": True},
        ),
        "its attention cannot be replaced from outside",
    ),
    "Dory": (
        Kind(title="", type="dory", settings={"sliding_window": WINDOW}),
        "its layers run more than once in a pass",
    ),
}


def table() -> str:
    """Return the tables of the documentation."""
    lines = ["| architecture | `model_type` | to get right | backends |", "|---|---|---|---|"]
    for kind in ZOO.values():
        backends = "`eager`, `sdpa`" if kind.sdpa else "`eager`"
        lines.append(f"| {kind.title} | `{kind.type}` | {kind.special} | {backends} |")
    lines += ["", "| refused | because |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, (_, reason) in REFUSED.items()]
    return "\n".join(lines)


_MARK = "<!-- made by tests/support/zoo.py -->"


def documented() -> str:
    """Return the documentation's text with the tables as they should be."""
    before, _, after = DOCS.read_text(encoding="utf-8").split(_MARK)
    return f"{before}{_MARK}\n\n{table()}\n\n{_MARK}{after}"


if __name__ == "__main__":
    DOCS.write_text(documented(), encoding="utf-8")
