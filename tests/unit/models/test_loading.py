"""Models load quietly and quickly, or fail with one line that names the file."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decodekit.errors import CheckpointError, ConfigError, DecodekitError, ModelSupportError
from decodekit.models import loading
from decodekit.models.loading import load_model


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def failure(directory: Path, kind: type[DecodekitError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        load_model(directory)
    text = str(caught.value)
    assert "\n" not in text
    assert str(directory) in text
    return text


def test_a_model_is_ready_for_inference(
    tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_model(tiny_llama)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == torch.float32
    assert model.device.type == "cpu"
    assert model(torch.tensor([tokenizer("abc").input_ids])).logits.shape == (1, 3, 32)
    assert capfd.readouterr() == ("", "")


def test_the_users_own_verbosity_is_kept(tiny_llama: Path) -> None:
    logger = logging.getLogger("transformers")
    before = logger.level
    load_model(tiny_llama)
    assert logger.level == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes(tiny_llama: Path, dtype: str) -> None:
    model, _ = load_model(tiny_llama, dtype=dtype, device="cpu")
    assert model.dtype == getattr(torch, dtype)


def test_auto_keeps_the_checkpoints_dtype_off_the_cpu(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_device", lambda _: torch.device("meta"))
    model, _ = load_model(tiny_llama)
    assert model.dtype == torch.bfloat16


def test_an_unknown_dtype_lists_the_choices(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16, float64") as caught:
        load_model(tiny_llama, dtype="int8")
    assert (caught.value.key, caught.value.value) == ("dtype", "int8")


@pytest.mark.parametrize("device", ["gpu", "", "cpu:0", "cuda:", "cuda:x", "mps:0", "cuda:-1"])
def test_an_unknown_device_lists_the_choices(tiny_llama: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="auto, cpu, cuda, cuda:N, mps") as caught:
        load_model(tiny_llama, device=device)
    assert (caught.value.key, caught.value.value) == ("device", device)


@pytest.mark.parametrize(
    ("cuda", "reason"), [(None, "this torch is a build without CUDA"), ("13.0", "finds no GPU")]
)
def test_cuda_without_a_gpu(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=f"{reason}; set device=cpu"):
        load_model(tiny_llama, device="cuda")


def test_devices_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert loading._device("auto") == torch.device("cuda")
    assert loading._device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="the last GPU is cuda:1"):
        loading._device("cuda:2")


def test_mps(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a Mac with an Apple GPU; set device=cpu"):
        load_model(tiny_llama, device="mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="float64 is not available on mps"):
        load_model(tiny_llama, device="mps", dtype="float64")


def test_a_directory_with_only_a_gguf(
    tmp_path: Path, write_gguf: Callable[[Path], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_model(write_gguf(tmp_path / "tiny" / "tiny.gguf").parent)
    assert model.dtype == torch.float32
    assert tokenizer.decode(tokenizer("hello").input_ids) == "hello"
    assert capfd.readouterr().err == ""


def test_a_gguf_file_is_read_by_itself_whatever_lies_beside_it(
    tiny_llama: Path, tmp_path: Path, write_gguf: Callable[[Path], Path]
) -> None:
    expected, _ = load_model(write_gguf(tmp_path / "alone" / "tiny.gguf").parent)
    write_gguf(tiny_llama / "other.gguf")
    model, tokenizer = load_model(write_gguf(tiny_llama / "tiny.gguf"))
    assert model.dtype == torch.float32
    # The other model's tokenizer has no merges.
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello").input_ids)[0] == "he"
    rows = torch.arange(5)[None]
    assert torch.equal(model(rows).logits, expected(rows).logits)


def test_a_broken_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGML")
    assert "tiny.gguf: tiny.gguf is not a GGUF file" in failure(tmp_path / "tiny.gguf")


def test_bin_weights(tiny_llama: Path) -> None:
    expected, _ = load_model(tiny_llama)
    weights = {name: value.clone() for name, value in expected.state_dict().items()}
    torch.save(weights, tiny_llama / "pytorch_model.bin")
    (tiny_llama / "model.safetensors").unlink()
    model, _ = load_model(tiny_llama)
    rows = torch.arange(5)[None]
    assert torch.equal(model(rows).logits, expected(rows).logits)
    data = (tiny_llama / "pytorch_model.bin").read_bytes()
    (tiny_llama / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    assert "pytorch_model.bin is cut short or corrupt" in failure(tiny_llama)


def test_what_is_not_there(tiny_llama: Path) -> None:
    assert "is not a directory" in failure(tiny_llama / "none")
    (tiny_llama / "tokenizer.json").unlink()
    assert "lacks a tokenizer (tokenizer.json" in failure(tiny_llama)
    (tiny_llama / "model.safetensors").unlink()
    assert "lacks weights" in failure(tiny_llama)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_file_cut_short_is_named(tiny_llama: Path, name: str, keep: float) -> None:
    file = tiny_llama / name
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    assert f": {name} is " in failure(tiny_llama)


def test_a_tokenizer_that_is_sound_json_and_no_tokenizer(tiny_llama: Path) -> None:
    (tiny_llama / "tokenizer.json").write_text('{"a": 1}')
    assert "its tokenizer cannot be read" in failure(tiny_llama)


def test_weights_that_do_not_fill_the_model(tiny_llama: Path) -> None:
    edit_config(tiny_llama, num_hidden_layers=3)
    text = failure(tiny_llama)
    assert "lacks 9 of the tensors that its config.json asks for" in text
    assert "model.layers.2." in text


def test_weights_of_another_shape(tiny_llama: Path) -> None:
    edit_config(tiny_llama, intermediate_size=48)
    assert failure(tiny_llama) == (
        f"{tiny_llama}: model.layers.0.mlp.down_proj.weight has the shape [16, 32] in the weights "
        "and [16, 48] by its config.json (and 5 more like it)"
    )
    edit_config(tiny_llama, intermediate_size=32, vocab_size=33)
    assert failure(tiny_llama).endswith(
        "lm_head.weight has the shape [32, 16] in the weights and [33, 16] by its config.json "
        "(and 1 more like it)"
    )


def test_a_bad_value_in_the_config(tiny_llama: Path) -> None:
    edit_config(tiny_llama, hidden_size="x")
    assert "hidden_size" in failure(tiny_llama)


@pytest.mark.parametrize("model_type", ["t5", "no_such_model"])
def test_a_model_of_another_kind(tiny_llama: Path, model_type: str) -> None:
    edit_config(tiny_llama, model_type=model_type, architectures=None)
    assert "no causal language model" in failure(tiny_llama, ModelSupportError)


def test_a_config_without_a_model_type(tiny_llama: Path) -> None:
    (tiny_llama / "config.json").write_text("{}")
    text = failure(tiny_llama, DecodekitError)
    assert "config.json" in text


def test_lack_of_memory_is_no_broken_checkpoint(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(tiny_llama)


def test_a_directory_may_be_moved_after_loading(tiny_llama: Path) -> None:
    model, _ = load_model(tiny_llama)
    expected = model(torch.arange(4)[None]).logits
    shutil.rmtree(tiny_llama)
    assert torch.equal(model(torch.arange(4)[None]).logits, expected)
