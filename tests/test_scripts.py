"""The scripts run: here on a CPU with a tiny model, where their figures say nothing."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodekit.backends.sdpa import SDPABackend
from decodekit.config.plugins.installed import registry

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


def of_wide_steps(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda out: wrong(out) if out.shape[1] > 30 else out


@pytest.mark.parametrize(
    ("broken", "verdict"),
    [
        pytest.param(of_wide_steps(lambda out: out * torch.nan), "WRONG; backend 'sdpa'", id="nan"),
        pytest.param(of_wide_steps(lambda out: out + 0.1), "WRONG; backend 'sdpa'", id="off"),
        pytest.param(of_wide_steps(lambda out: out.to("nowhere")), "WRONG: ([(300, 6", id="raises"),
        pytest.param(lambda out: out, "equal; backend 'sdpa' cannot do logit", id="right"),
    ],
)
def test_the_gpu_check_names_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[torch.Tensor], torch.Tensor], verdict: str
) -> None:
    """Also one that is wrong in a later case only, or fails outside our errors."""
    real = SDPABackend.attend

    def attend(self: SDPABackend, *arguments: Any, **options: Any) -> Any:
        return broken(real(self, *arguments, **options))

    monkeypatch.setattr(SDPABackend, "attend", attend)
    script = runpy.run_path(str(SCRIPTS / "gpu_check.py"), run_name="script")
    _, found = script["judged"]("sdpa", torch.float32, torch.device("cpu"))
    assert found.startswith(verdict)
