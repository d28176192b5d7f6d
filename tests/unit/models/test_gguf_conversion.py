"""A GGUF becomes a plain float32 checkpoint with the same logits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decodekit.errors import CheckpointError
from decodekit.models.contents import has_tokenizer, missing
from decodekit.models.gguf_conversion import convert_gguf, require_gguf
from decodekit.models.loading import load_model


def test_the_converted_model_computes_the_same(
    tmp_path: Path, write_gguf: Callable[[Path], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    gguf = write_gguf(tmp_path / "source" / "tiny.gguf")
    output = tmp_path / "output"
    output.mkdir()
    convert_gguf(gguf, output)
    assert missing(output) is None
    assert has_tokenizer(output)
    assert (output / "generation_config.json").is_file()
    assert "quantization_config" not in json.loads((output / "config.json").read_text())
    direct, _ = load_model(gguf.parent)
    converted, tokenizer = load_model(output)
    rows = torch.tensor([tokenizer("hello").input_ids])
    assert torch.equal(direct(rows).logits, converted(rows).logits)
    assert converted.get_input_embeddings().weight is converted.get_output_embeddings().weight
    assert capfd.readouterr().err == ""


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF and no more")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf cannot be converted: ") as caught:
        convert_gguf(gguf, tmp_path)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_disk_is_left_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_gguf: Callable[[Path], Path]
) -> None:
    from transformers import PreTrainedModel

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left") as caught:
        convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "output")
    assert not isinstance(caught.value, CheckpointError)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match=r"x is a GGUF file.*`pip install gguf accelerate`"):
        require_gguf("x")
