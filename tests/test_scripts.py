"""The scripts run: here on a CPU with a tiny model, where their figures say nothing."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from decodekit.plugins import registry

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_the_gpu_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.json"
    arguments = ["gpu_check.py", "--size", "tiny", "--tokens", "8", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert runpy.run_path(str(SCRIPTS / "gpu_check.py"))["main"]() == 0
    results = json.loads(output.read_text(encoding="utf-8"))
    backends = set(registry().names("backend"))
    assert {row["backend"] for row in results["backends"]} == backends - {"eager"}
    usable = {row["backend"] for row in results["lossless"]}
    assert {"eager", "sdpa"} <= usable <= backends
    assert {row["verdict"] for row in results["lossless"]} == {"equal"}
    assert {row["backend"] for row in results["step_ms"]} == usable
    assert all(row["256"] > 0 for row in results["step_ms"])
    assert all(row["tokens_per_second"] > 0 for row in results["speed"])
    assert [row["who"] for row in results["speed"][:2]] == [
        "transformers greedy",
        "transformers prompt_lookup",
    ]
    assert "Tokens per second" in capsys.readouterr().out
