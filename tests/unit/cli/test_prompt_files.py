"""Files of prompts in every form, and files that are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decodekit.cli.prompt_files import FilePrompt, read_prompts
from decodekit.errors import ConfigError


def write(path: Path, *records: Any) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    (path / "p.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path / "p.jsonl")


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "hi"}, FilePrompt("1", "all", "hi", True)),
        ({"input_ids": [1, 2]}, FilePrompt("1", "all", [1, 2], True)),
        ({"turns": ["one", "two"]}, FilePrompt("1", "all", "one", True)),
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            FilePrompt("1", "all", [{"role": "user", "content": "hi"}], True),
        ),
        (
            {"id": 7, "task": "code", "kind": "completion", "prompt": "def f("},
            FilePrompt("7", "code", "def f(", False),
        ),
        (
            {"id": "q-1", "category": "math", "kind": "chat", "prompt": "2+2"},
            FilePrompt("q-1", "math", "2+2", True),
        ),
        ({"task": "a", "category": "b", "prompt": "x"}, FilePrompt("1", "a", "x", True)),
        ({"input_ids": [1], "prompt": "x"}, FilePrompt("1", "all", [1], True)),
    ],
)
def test_every_form_of_a_prompt(tmp_path: Path, record: Any, prompt: FilePrompt) -> None:
    assert read_prompts(write(tmp_path, record), key="bench.prompts") == [prompt]


def test_prompts_without_an_id_are_numbered_by_their_line(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, "", "  ", {"prompt": "b"})
    assert [(p.id, p.prompt) for p in read_prompts(path, key="bench.prompts")] == [
        ("1", "a"),
        ("4", "b"),
    ]


@pytest.mark.parametrize(
    ("limit", "ids"), [(0, "1 2 3 4 5"), (1, "1 2"), (2, "1 2 3 5"), (9, "1 2 3 4 5")]
)
def test_a_limit_is_of_each_category(tmp_path: Path, limit: int, ids: str) -> None:
    path = write(tmp_path, *({"task": task, "prompt": "x"} for task in "abaab"))
    assert " ".join(p.id for p in read_prompts(path, limit=limit, key="bench.prompts")) == ids


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    """Inside a JSON string other line separators of Unicode are ordinary characters."""
    text = "one\u2028two\u0085three\u000cfour"
    path = write(tmp_path, {"prompt": text}, {"prompt": "next"})
    assert [p.prompt for p in read_prompts(path, key="bench.prompts")] == [text, "next"]


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        '"text"',
        "{}",
        '{"turns": []}',
        '{"turns": null}',
        '{"turns": "hello"}',
        '{"text": "under another name"}',
        '{"prompt": null}',
        '{"prompt": 5}',
        '{"input_ids": "1 2"}',
        '{"turns": [5]}',
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    assert mistake(tmp_path, line) == (
        "needs input_ids or messages (lists), turns (a list of texts) or prompt (a text)"
    )


@pytest.mark.parametrize("line", ["not json", '{"prompt": "cut off'])
def test_a_line_that_is_not_json_is_named(tmp_path: Path, line: str) -> None:
    assert mistake(tmp_path, line).startswith("is not JSON: ")


@pytest.mark.parametrize("kind", ["Chat", None, 5])
def test_a_kind_is_one_of_two(tmp_path: Path, kind: object) -> None:
    path = write(tmp_path, {"prompt": "a", "kind": kind})
    with pytest.raises(ConfigError, match=r"line 1 of .*: kind must be chat or completion, not"):
        read_prompts(path, key="bench.prompts")


def mistake(tmp_path: Path, line: str) -> str:
    """Return what is said about a second line, without its place."""
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, key="bench.prompts")
    assert caught.value.key == "bench.prompts"
    place = f"line 2 of {path} "
    assert str(caught.value).startswith(place)
    return str(caught.value)[len(place) :]


def test_a_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, key="bench.prompts")
    assert str(caught.value) == f"{path} holds no prompts"


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, key="bench.prompts")
    assert str(caught.value) == f"cannot read the prompts in {path}: No such file or directory"
    assert caught.value.key == "bench.prompts"


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ConfigError, match="cannot read the prompts in") as caught:
        read_prompts(str(path), key="bench.prompts")
    assert caught.value.key == "bench.prompts"
