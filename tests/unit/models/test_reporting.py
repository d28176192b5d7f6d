"""What the user reads is one line."""

from __future__ import annotations

import pytest

from decodekit.models.reporting import one_line, to_stderr


def test_to_stderr_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    to_stderr("hello")
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("a\n b", "a b"),
        (ValueError("a\nb"), "ValueError: a b"),
        (ValueError(), "ValueError"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_one_line(error: object, text: str) -> None:
    assert one_line(error) == text
