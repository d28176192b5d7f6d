"""The command line as users start it: signals, pipes and files need a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

MODULE = [sys.executable, "-m", "decodekit"]


# Pinning of threads in the process that runs the tests would leave one core to its children.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*MODULE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env=ENVIRONMENT,
        # A shell starts what runs in its background with SIGINT ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_defaults_compare_and_leave_no_files(tmp_path: Path) -> None:
    process = start("prompt=What is 2+2? (Answer, please!)", "compare=true", cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "4" in out
    assert "equal tokens" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_mid_text_keeps_what_there_is(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start(
        "prompt=Write a long story.", "max_new_tokens=2000", "strategy=autoregressive", cwd=tmp_path
    )
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert len(first) == 20
    assert "(cancelled)" in err
    assert "Traceback" not in err + out


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    process = start("prompt=Write a story.", "max_new_tokens=60", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.wait(timeout=120)
    process.stderr.close()
    assert process.stdin is not None
    process.stdin.close()
    assert "Traceback" not in err


def test_stdin_to_json(tmp_path: Path) -> None:
    process = start("prompt=-", "format=json", "max_new_tokens=12", cwd=tmp_path)
    out, err = process.communicate("Say hello.", timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out)["stats"]["tokens"] <= 12


def test_a_hub_model_without_a_network_is_one_line_within_seconds(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*MODULE, "model=llama2-7b", "prompt=x"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("decodekit: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are pinned on Linux")
@pytest.mark.parametrize("pin", [True, False])
def test_a_job_that_measures_time_pins_its_threads(tmp_path: Path, pin: bool) -> None:
    output = tmp_path / "curve.json"
    process = start(
        "job=profile",
        "profile.rows=[1,2]",
        "profile.contexts=[8]",
        "profile.repeats=1",
        f"profile.output={output}",
        f"profile.pin={str(pin).lower()}",
        cwd=tmp_path,
    )
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    machine = json.loads(output.read_text(encoding="utf-8"))["machine"]
    assert machine["openmp"].get("OMP_PROC_BIND") == ("close" if pin else None)
    if pin:
        assert machine["threads"] == len(machine["openmp"]["OMP_PLACES"].split(","))
        assert len(machine["main_thread_cpus"]) == 1
    else:
        assert machine["main_thread_cpus"] == sorted(os.sched_getaffinity(0))
