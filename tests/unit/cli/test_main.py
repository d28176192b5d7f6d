"""The command line without a model: flags, exit codes, and where each word goes."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import pytest
import yaml

from decodekit import __version__
from decodekit.cli import main as cli
from decodekit.cli.main import main
from decodekit.config.schema import RunConfig
from decodekit.errors import CheckpointError, ConfigError, GenerationError


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs that would have been run."""
    ran: list[RunConfig] = []

    def run(config: RunConfig) -> int:
        ran.append(config)
        return 0

    monkeypatch.setattr(cli, "_run", run)
    return ran


def test_version_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"decodekit {__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_what_is_installed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed=1", flag]) == 0
    text = capsys.readouterr().out
    assert text.startswith("decodekit [key=value ...]: ")
    assert (
        "strategy=NAME          autoregressive, draft_model, jacobi, lookahead, prompt_lookup\n"
        in text
    )
    assert "backend=NAME           auto, eager, flash, flex, invariant, sdpa, triton\n" in text
    assert "adapter=NAME           auto, hf, llama (auto: llama where it fits, else hf)\n" in text
    for model in ("llama2-7b", "qwen2.5-0.5b", "smollm2-135m", "local"):
        assert model in text
    assert "{" not in text.replace('{"', "")  # nothing is left to be filled in


def test_cfg_prints_the_settings_and_runs_nothing(
    jobs: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["strategy=jacobi", "--cfg", "seed=3", "prompt=a: b"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["strategy"] == {"name": "jacobi", "window_size": 8}
    assert (printed["seed"], printed["sampling"]["seed"], printed["prompt"]) == (3, 3, "a: b")
    assert jobs == []


def test_words_become_settings(jobs: list[RunConfig]) -> None:
    assert main(["prompt=--help is a flag", "strategy=jacobi", "max_new_tokens=5"]) == 0
    (config,) = jobs
    assert config.prompt == "--help is a flag"
    assert (config.strategy.name, config.max_new_tokens) == ("jacobi", 5)


def test_the_process_words_are_taken_by_default(
    jobs: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["decodekit", "seed=9"])
    assert main() == 0
    assert jobs[0].seed == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x"], "unknown option --prompt: settings are key=value, see --help"),
        (["-x"], "unknown option -x: settings are key=value, see --help"),
        (["strategy=lookahed"], "unknown strategy 'lookahed': did you mean 'lookahead'?"),
        (["max_new_tokens=-1"], "max_new_tokens must be 0 or more, not -1"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error_and_exit_code_2(
    arguments: list[str],
    message: str,
    jobs: list[RunConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"decodekit: {message}\n"
    assert jobs == []


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("bad\n  setting"), 2, "decodekit: bad setting\n"),
        (GenerationError("no luck"), 1, "decodekit: no luck\n"),
        (CheckpointError("no file"), 1, "decodekit: no file\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_code_says_what_went_wrong(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(config: RunConfig) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert main([]) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", message)


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: RunConfig) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ZeroDivisionError):
        main([])


def test_a_closed_pipe_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(config: RunConfig) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_run", fail)
    saved = os.dup(1)
    try:
        monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(1), "w"))
        assert main([]) == 1
        sys.stdout.close()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("job", "module"),
    [("generate", "generate"), ("bench", "bench.run"), ("profile", "profile.run")],
)
def test_each_job_goes_to_its_module(
    job: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def run(config: RunConfig) -> int:
        seen.append(config.job)
        return 7

    monkeypatch.setattr(f"decodekit.cli.{module}.run_{job}", run)
    assert main([f"job={job}"]) == 7
    assert seen == [job]


def test_the_package_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def dispatch(arguments: list[str], *, is_program: bool) -> int:
        seen.append(arguments)
        assert is_program
        return 3

    monkeypatch.setattr(cli, "_dispatch", dispatch)
    monkeypatch.setattr(sys, "argv", ["decodekit", "seed=1"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("decodekit", run_name="__main__")
    assert caught.value.code == 3
    assert seen == [["seed=1"]]


def test_a_stored_benchmark_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def report(arguments: list[str]) -> int:
        seen.append(arguments)
        return 0

    monkeypatch.setattr("decodekit.cli.report.run_report", report)
    assert main(["report", "a=b.jsonl"]) == 0
    assert seen == [["a=b.jsonl"]]


@pytest.mark.parametrize(
    ("words", "pinned"),
    [
        (["job=bench"], True),
        (["job=profile"], True),
        (["job=bench", "bench.pin=false"], False),
        (["job=profile", "profile.pin=false"], False),
        (["job=generate"], False),
        (["job=bench", "--cfg"], False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_only_a_program_that_measures_time_is_started_anew(
    words: list[str],
    pinned: bool,
    jobs: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restarts: list[None] = []
    monkeypatch.setattr(cli, "restart_pinned", lambda: restarts.append(None))
    assert main(words) == 0
    assert restarts == []  # whoever calls main() with words has a process of their own
    assert main(words, is_program=True) == 0
    assert len(restarts) == int(pinned)
    monkeypatch.setattr(sys, "argv", ["decodekit", *words])
    assert main() == 0
    assert len(restarts) == 2 * int(pinned)
