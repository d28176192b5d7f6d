"""What a directory holds, told from names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decodekit.models.contents import has_tokenizer, missing, single_gguf, weight_files


def fill(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).write_text("{}")
    return directory


def index(directory: Path, name: str, *shards: str) -> None:
    content = {"weight_map": {f"w{i}": shard for i, shard in enumerate(shards)}}
    (directory / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        (["config.json", "model.safetensors"], None),
        (["config.json", "pytorch_model.bin"], None),
        (["x.gguf"], None),
        (["config.json", "x.gguf"], None),
        (["model.safetensors"], "config.json"),
        (["config.json"], "weights (model.safetensors, "),
        (["config.json", "consolidated.safetensors"], "weights (model.safetensors, "),
        ([], "config.json and weights (model.safetensors, "),
        (["x.gguf", "y.gguf"], "a single .gguf file: it has 2, give the path of one (x.gguf)"),
    ],
)
def test_missing(tmp_path: Path, names: list[str], lacks: str | None) -> None:
    found = missing(fill(tmp_path, *names))
    assert found == lacks if lacks is None else str(found).startswith(lacks)


@pytest.mark.parametrize("single", ["model.safetensors", "pytorch_model.bin"])
def test_all_shards_must_be_there(tmp_path: Path, single: str) -> None:
    fill(tmp_path, "config.json", "a")
    index(tmp_path, f"{single}.index.json", "c", "a", "b", "b")
    assert weight_files(tmp_path) == tuple(tmp_path / name for name in "abc")
    assert missing(tmp_path) == "b and 1 more shards"
    fill(tmp_path, "b")
    assert missing(tmp_path) == "c"
    fill(tmp_path, "c")
    assert missing(tmp_path) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_broken_shard_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert missing(tmp_path) == "a readable model.safetensors.index.json"


def test_safetensors_come_before_bin_and_both_before_gguf(tmp_path: Path) -> None:
    fill(tmp_path, "x.gguf")
    assert single_gguf(tmp_path) == tmp_path / "x.gguf"
    fill(tmp_path, "pytorch_model.bin")
    assert weight_files(tmp_path) == (tmp_path / "pytorch_model.bin",)
    assert single_gguf(tmp_path) is None
    fill(tmp_path, "model.safetensors")
    assert weight_files(tmp_path) == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tokenizer.json", True),
        ("tokenizer.model", True),
        ("qwen.tiktoken", True),
        ("x.gguf", True),
        ("tokenizer_config.json", False),
    ],
)
def test_has_tokenizer(tmp_path: Path, name: str, found: bool) -> None:
    assert has_tokenizer(fill(tmp_path, name)) is found
