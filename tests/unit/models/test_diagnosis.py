"""The broken file is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from decodekit.models.diagnosis import broken_file


def test_a_sound_directory(tiny_llama: Path) -> None:
    assert broken_file(tiny_llama) is None


@pytest.mark.parametrize("size", [-1, 100, 8, 3, 0])
def test_safetensors_cut_short(tiny_llama: Path, size: int) -> None:
    file = tiny_llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    bytes_left = file.stat().st_size
    expected = f"model.safetensors is cut short or corrupt ({bytes_left:,} bytes; "
    assert str(broken_file(tiny_llama)).startswith(expected)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", b"{", "config.json is not readable JSON (JSONDecodeError"),
        ("config.json", b"\xff", "config.json is not readable JSON (UnicodeDecodeError"),
        ("config.json", b"[]", "config.json is not a JSON object"),
        ("tokenizer.json", b'{"a', "tokenizer.json is not readable JSON"),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "model.safetensors is a Git LFS pointer, not the file itself: run `git lfs pull`",
        ),
    ],
)
def test_other_files(tiny_llama: Path, name: str, content: bytes, problem: str) -> None:
    (tiny_llama / name).write_bytes(content)
    assert str(broken_file(tiny_llama)).startswith(problem)


def test_bin_and_gguf(tmp_path: Path) -> None:
    import torch

    torch.save({}, tmp_path / "pytorch_model.bin")
    assert broken_file(tmp_path) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert broken_file(tmp_path) == "pytorch_model.bin is cut short or corrupt (2 bytes)"
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert broken_file(tmp_path) is None
    (tmp_path / "x.gguf").write_bytes(b"html")
    assert broken_file(tmp_path) == "x.gguf is not a GGUF file (4 bytes)"
