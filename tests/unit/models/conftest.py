"""Tiny models on the disk, caches of their own, and no network."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point decodekit's and the hub's cache at an empty directory; returns decodekit's."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("DECODEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def said() -> list[str]:
    """Collects what is logged: pass ``said.append`` as the log."""
    return []


@pytest.fixture(scope="session")
def _tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("tiny") / "llama"
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    bpe = models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(bpe), eos_token="a")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def tiny_llama(_tiny_llama: Path, tmp_path: Path) -> Path:
    """A directory with a random two-layer LLaMA in bfloat16 and a tokenizer; free to break."""
    return Path(shutil.copytree(_tiny_llama, tmp_path / "llama"))


@pytest.fixture(scope="session")
def write_gguf() -> Callable[[Path], Path]:
    """Writes a random one-layer LLaMA with tied embeddings and a tokenizer as a GGUF file."""

    def write(file: Path) -> Path:
        import numpy
        from gguf import GGUFWriter

        width, inner, vocabulary = 16, 32, len(LETTERS) + 2
        random = numpy.random.default_rng(0)
        file.parent.mkdir(parents=True, exist_ok=True)
        writer = GGUFWriter(file, "llama")
        writer.add_name("tiny")
        writer.add_context_length(64)
        writer.add_embedding_length(width)
        writer.add_block_count(1)
        writer.add_feed_forward_length(inner)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(vocabulary)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*LETTERS, "he", "de"])
        writer.add_token_types([1] * vocabulary)
        writer.add_token_merges(["h e", "d e"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        shapes = {
            "token_embd": (vocabulary, width),
            "output_norm": (width,),
            "blk.0.attn_norm": (width,),
            "blk.0.attn_q": (width, width),
            "blk.0.attn_k": (width // 2, width),
            "blk.0.attn_v": (width // 2, width),
            "blk.0.attn_output": (width, width),
            "blk.0.ffn_norm": (width,),
            "blk.0.ffn_gate": (inner, width),
            "blk.0.ffn_up": (inner, width),
            "blk.0.ffn_down": (width, inner),
        }
        for name, shape in shapes.items():
            values = random.standard_normal(shape).astype(numpy.float32)
            writer.add_tensor(f"{name}.weight", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write
