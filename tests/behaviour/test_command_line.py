"""The command line over a tiny model, run in this process; signals and pipes are in tests/e2e."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodekit import Decoder
from decodekit.adapters.execution.packed import can_pack
from decodekit.cli.bench.contenders import _StrategyContender
from decodekit.cli.bench.measurement import Run
from decodekit.cli.main import main
from decodekit.cli.verify.certificate import Divergence, Verdict
from decodekit.decoder.stream import GenerationStream
from decodekit.errors import GenerationError


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> str:
    decoder = Decoder.from_config(model=checkpoint, strategy="autoregressive")
    return decoder.generate("a b c", max_new_tokens=9).text


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_answer_goes_to_stdout_and_the_summary_to_stderr(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, f"model={checkpoint}", "prompt=a b c", "max_new_tokens=9")
    assert (code, out) == (0, expected + "\n")
    assert err.count("\n") == 2  # an empty line and the summary
    for part in ("lookahead: 9 tokens in", "tokens/step", "rows/step", "tokens/s", "first token"):
        assert part in err
    assert list(tmp_path.iterdir()) == []  # no outputs/, no logs
    assert Path.cwd() == tmp_path


def test_the_summary_and_the_record_say_what_compiling_has_cost(
    capsys: pytest.CaptureFixture[str], checkpoint: str, expected: str
) -> None:
    arguments = [f"model={checkpoint}", "prompt=a b c", "max_new_tokens=9"]
    arguments += ["strategy=autoregressive", "execution=compiled"]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (0, expected + "\n")
    found = re.search(r"execution compiled \(compiled (\d) times, \d+\.\d s\)\n$", err)
    assert found is not None
    code, out, _ = run(capsys, *arguments, "format=json")
    record = json.loads(out)
    assert record["text"] == expected
    assert record["execution"] == "compiled"
    # What another decoder of this process has compiled is not compiled again.
    assert record["compilation"] == {"count": 0, "seconds": 0.0}


def test_where_ties_may_fall_another_way_in_half_precision_it_is_said(
    capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    arguments = [f"model={checkpoint}", "prompt=a b c", "max_new_tokens=4", "dtype=bfloat16"]
    reason = "its model.layers.0.self_attn.q_proj is not packed"
    _, _, err = run(capsys, *arguments, "execution=eager")
    assert err.endswith(f", execution eager, ties may fall another way: {reason}\n")
    _, out, _ = run(capsys, *arguments, "execution=eager", "format=json")
    assert json.loads(out)["invariance_obstacle"] == reason
    if can_pack(torch.bfloat16):
        _, _, err = run(capsys, *arguments, "execution=packed")
        assert err.endswith(", execution packed\n")


def test_an_execution_that_cannot_work_is_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    arguments = [f"model={checkpoint}", "prompt=a b c"]
    code, _, err = run(capsys, *arguments, "adapter=hf", "execution=compiled")
    assert (code, err.count("\n")) == (2, 1)
    assert "execution=compiled needs adapter=llama" in err
    if not torch.cuda.is_available():
        code, _, err = run(capsys, *arguments, "execution=graphs")
        assert (code, err.count("\n")) == (2, 1)
        assert "execution=graphs needs an NVIDIA GPU" in err


def test_compare(capsys: pytest.CaptureFixture[str], checkpoint: str, expected: str) -> None:
    code, out, err = run(
        capsys, f"model={checkpoint}", "prompt=a b c", "max_new_tokens=9", "compare=true"
    )
    assert (code, out) == (0, expected + "\n")
    assert "autoregressive: 9 tokens in 9 steps" in err
    assert "times as fast, equal tokens" in err
    assert "autoregressive against the model's own forward pass: equal tokens" in err


def test_compare_fails_where_the_tokens_differ(
    capsys: pytest.CaptureFixture[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Decoder.with_strategy

    def other(self: Decoder, strategy: object, **options: object) -> Decoder:
        decoder = keep(self, strategy, **options)
        decoder.sampling = replace(decoder.sampling, temperature=5.0)
        return decoder

    monkeypatch.setattr(Decoder, "with_strategy", other)
    code, _, err = run(
        capsys, f"model={checkpoint}", "prompt=a b c", "compare=true", "max_new_tokens=9"
    )
    assert code == 1
    assert "DIFFERENT from token" in err


def test_json(capsys: pytest.CaptureFixture[str], checkpoint: str, expected: str) -> None:
    code, out, err = run(
        capsys,
        f"model={checkpoint}",
        "prompt=a b c",
        "max_new_tokens=9",
        "format=json",
        "compare=true",
        "strategy=jacobi",
    )
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert record["text"] == expected
    assert len(record["tokens"]) == record["stats"]["tokens"] == 9
    assert record["finish_reason"] == "length"
    assert record["strategy"] == {"name": "jacobi", "window_size": 8}
    assert record["adapter"] == "llama"
    assert record["execution"] == ("packed" if can_pack(torch.float32) else "eager")
    assert "compilation" not in record
    assert record["compare"]["equal"] is True
    assert record["compare"]["autoregressive"]["steps"] == 9
    assert record["compare"]["independent"]["kind"] == "equal"


def test_prompts_from_stdin_and_files(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("a b c", encoding="utf-8")
    common = (f"model={checkpoint}", "max_new_tokens=9")
    assert run(capsys, *common, f"prompt_file={file}")[1] == expected + "\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a b c")))
    assert run(capsys, *common, "prompt=-")[1] == expected + "\n"


def test_chat_stop_and_sampling(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    common = (f"model={checkpoint}", "prompt=a b c", "max_new_tokens=9")
    chat = run(capsys, *common)[1]
    plain = run(capsys, *common, "chat=false")[1]
    assert plain != chat
    word = chat.split()[3]
    assert run(capsys, *common, f"stop={word}")[1] == chat[: chat.index(word)] + "\n"
    assert run(capsys, *common, f"stop=[zzz,'{word}']")[1] == chat[: chat.index(word)] + "\n"
    sampled = [
        run(capsys, *common, "sampling=sample", "sampling.temperature=2.0", *more)[1]
        for more in (["seed=1"], ["seed=1", "strategy=autoregressive"], ["seed=2"])
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategy=lookahed"], "unknown strategy 'lookahed': did you mean 'lookahead'?"),
        (["strategy.windw_size=3"], "unknown key 'windw_size' in 'strategy': did you mean"),
        (["prompt=x", "strategy.window_size=0"], "window_size must be 1 or more, not 0"),
        ([], "give a prompt"),
        (["prompt=x", "prompt_file=y"], "not both"),
        (["prompt_file=/nowhere"], "cannot read the prompt file '/nowhere'"),
        (["job=bench"], "give prompts: bench.prompts=FILE.jsonl"),
        (["job=bench", "bench.prompts=/nowhere"], "cannot read the prompts in /nowhere"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("decodekit: ")
    assert message in err
    assert err.count("\n") == 1


def test_run_time_errors_are_one_line_and_code_1(
    capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    code, _, err = run(capsys, "model=/nowhere/at/all", "prompt=x")
    assert code == 1
    assert "/nowhere/at/all" in err
    assert err.count("\n") == 1
    code, _, err = run(capsys, f"model={checkpoint}", "prompt=" + "a " * 200)
    assert code == 1
    assert "the model's context is 128; shorten the prompt" in err


TIE = Divergence(position=3, expected=5, got=6, gap=4e-6)
BUG = Divergence(position=4, expected=5, got=6, gap=None)


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        (Verdict(kind="equal", tokens=9), 0, "equal tokens"),
        (
            Verdict(kind="tie", tokens=9, divergences=(TIE, TIE)),
            0,
            "equal but for numerical ties at token 3 (gap 4e-06), 3 (gap 4e-06)",
        ),
        (
            Verdict(kind="defect", tokens=9, divergences=(TIE, BUG)),
            1,
            "DIFFERENT from token 4 on",
        ),
    ],
)
def test_compare_tells_a_tie_from_a_defect(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Verdict,
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr("decodekit.cli.generate.compare", lambda *_, **__: verdict)
    arguments = (f"model={checkpoint}", "prompt=a b c", "max_new_tokens=6", "compare=true")
    found, _, err = run(capsys, *arguments)
    assert found == code
    assert words in err
    found, out, _ = run(capsys, *arguments, "format=json")
    assert found == code
    compared = json.loads(out)["compare"]
    assert compared["equal"] is (verdict.kind == "equal")
    assert compared["verdict"]["kind"] == verdict.kind
    assert len(compared["verdict"]["divergences"]) == len(verdict.divergences)


def test_an_answer_is_shown_though_its_comparison_fails(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise GenerationError("no memory")

    monkeypatch.setattr("decodekit.cli.generate.compare", failing)
    arguments = (f"model={checkpoint}", "prompt=a b c", "max_new_tokens=9", "compare=true")
    code, out, err = run(capsys, *arguments, "format=json")
    assert code == 1
    assert json.loads(out)["text"] == expected
    assert "compare" not in json.loads(out)
    assert err == "decodekit: no memory\n"


def test_compare_takes_the_settings_of_verify(
    capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    arguments = (f"model={checkpoint}", "prompt=a b c", "max_new_tokens=3", "compare=true")
    code, _, err = run(capsys, *arguments, "verify.backend=nonsense")
    assert code == 2
    assert "unknown backend 'nonsense'" in err
    code, _, err = run(capsys, *arguments, "verify.backend=eager", "verify.tolerance=0.5")
    assert code == 0
    assert "equal tokens" in err


def test_stdin_that_is_not_text(
    capsys: pytest.CaptureFixture[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00")))
    code, _, err = run(capsys, f"model={checkpoint}", "prompt=-")
    assert code == 2
    assert "not UTF-8" in err


def test_ctrl_c_keeps_the_text_so_far(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = GenerationStream.__next__
    count = 0

    def interrupted(self: GenerationStream) -> object:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(GenerationStream, "__next__", interrupted)
    code, out, err = run(
        capsys,
        f"model={checkpoint}",
        "prompt=a b c",
        "max_new_tokens=9",
        "strategy=autoregressive",
    )
    assert code == 130
    assert out.strip()
    assert expected.startswith(out.strip())
    assert "3 tokens in 3 steps" in err
    assert "(cancelled)" in err


def test_bench(capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "one", "category": "x", "kind": "chat", "turns": ["a b c"]},
        {"id": "two", "category": "y", "input_ids": [3, 4, 5]},
        {"id": "three", "category": "y", "input_ids": [3, 4, 6]},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    output = tmp_path / "out.jsonl"
    code, out, _ = run(
        capsys,
        "job=bench",
        f"model={checkpoint}",
        f"bench.prompts={prompts}",
        "bench.limit=1",
        "bench.repeats=2",
        "bench.reference=lookahead(window_size=3)",
        "bench.strategies=[autoregressive,{name:lookahead,window_size:3}]",
        f"bench.output={output}",
        "max_new_tokens=8",
    )
    assert code == 0
    for name in ("| autoregressive", "| lookahead(window_size=3)", "| transformers greedy"):
        assert out.count(name) == 3  # all, x and y
    last = out.rstrip().split("\n\n")[-2:]
    assert last == [
        "every contender gave the tokens of lookahead(window_size=3) on every prompt",
        "fewer than 5 prompts in x, y: an interval from so few is too narrow",
    ]
    assert "transformers prompt_lookup" in out
    header, *records = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert header["header"]["versions"]["torch"]
    assert header["header"]["adapter"] == "llama"
    assert header["header"]["reference"] == "lookahead(window_size=3)"
    assert header["header"]["threads"] >= 1
    assert header["header"]["openmp"] == {
        name: value for name, value in os.environ.items() if name.startswith("OMP_")
    }
    assert len(records) == 2 * 2 * 4
    assert all(record["equal"] for record in records)
    assert all(len(record["run"]["tokens"]) == 8 for record in records)
    steps = {record["contender"]: record["run"]["steps"] for record in records}
    assert steps["autoregressive"] == steps["transformers greedy"] == 8
    # The tables can be had again from the file, to the letter, and with another reference.
    assert run(capsys, "report", str(output)) == (0, out, "")
    code, other, _ = run(capsys, "report", str(output), "reference=transformers greedy")
    assert code == 0
    assert "the tokens of transformers greedy on every prompt" in other
    code, _, err = run(capsys, "report", str(output), "reference=greedy")
    assert code == 2
    assert "the reference 'greedy' is no contender: choose one of: autoregressive, look" in err


def test_a_bench_shows_where_tokens_differ_and_fails(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A contender of ours that gives another third token on one of two prompts."""
    measured = _StrategyContender.run

    def wrong(self: _StrategyContender, prompt: list[int], max_new_tokens: int) -> Run:
        run = measured(self, prompt, max_new_tokens)
        if self.name == "jacobi" and prompt == [3, 4]:
            run.tokens[2] = (run.tokens[2] + 1) % 64
        return run

    monkeypatch.setattr(_StrategyContender, "run", wrong)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "p1", "input_ids": [3]}\n{"id": "p2", "input_ids": [3, 4]}\n')
    common = (
        "job=bench",
        f"model={checkpoint}",
        f"bench.prompts={prompts}",
        "bench.strategies=[autoregressive,jacobi]",
        "bench.baselines=[greedy]",
        "max_new_tokens=5",
    )
    code, out, _ = run(capsys, *common)
    assert code == 1
    assert (
        "| jacobi                   |       2 |         1 |                         2 (p2) |" in out
    )
    assert (
        "| transformers greedy      |       2 |         0 |                              - |" in out
    )
    code, out, _ = run(capsys, *common, "bench.reference=jacobi", "bench.strategies=[jacobi]")
    assert code == 0  # it is transformers that differs now, which is no mistake of ours
    assert "| transformers greedy | 2 | 1 | 2 (p2) |" in " ".join(out.split())


def test_bench_mistakes(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [3]}\n', encoding="utf-8")
    common = ("job=bench", f"model={checkpoint}", f"bench.prompts={prompts}")
    for extra, message in (
        ("bench.baselines=[gredy]", "unknown baseline 'gredy': did you mean 'greedy'"),
        ("bench.strategies=[lookahed]", "unknown strategy 'lookahed'"),
        ("sampling=sample", "a benchmark is plain greedy"),
        (
            "bench.reference=autoregresive",
            "the reference 'autoregresive' is no contender: did you mean 'autoregressive'?",
        ),
        ("bench.strategies=[jacobi,jacobi]", "a contender is named twice"),
    ):
        code, _, err = run(capsys, *common, extra)
        assert code == 2
        assert message in err
    code, _, err = run(capsys, *common, "bench.strategies=[]", "bench.baselines=[]")
    assert code == 2
    assert "nothing to compare" in err


RUN = {
    "tokens": [1],
    "steps": 1,
    "rows_per_step": None,
    "seconds": 0.5,
    "time_to_first_token": None,
    "host_seconds": None,
}
LINE = json.dumps(
    {"prompt": "p", "category": "c", "contender": "a", "repeat": 0, "equal": True, "run": RUN}
)


def test_a_report_of_a_file_from_before_there_was_a_reference(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text(f'{{"header": {{}}}}\n{LINE}\n')
    code, out, _ = run(capsys, "report", str(file))
    assert code == 0
    assert "| a               |      2.0 |  1.00 |             - |" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the measurements in"),
        (b"\xff", "it is not UTF-8 text"),
        (b"", "does not begin with a header; it must be a bench.output of job=bench"),
        (b"[]", "does not begin with a header"),
        (b'{"header": 3}', "does not begin with a header"),
        (b'{"header": {}}\n\n{"prompt": "p"}', "line 3 of"),
        (
            b'{"header": {}}\n' + LINE.encode()[:-9],
            "is no measurement; if the benchmark was killed",
        ),
        (b'{"header": {}, "x": "decodekit-step-times"}', "holds no step times"),
    ],
    ids=[f"content{number}" for number in range(8)],
)
def test_a_report_of_a_file_that_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "file.jsonl"
    if content is not None:
        file.write_bytes(content)
    code, out, err = run(capsys, "report", str(file))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_report_is_of_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["a", "b"], ["a", "reference=x", "reference=y"]):
        code, _, err = run(capsys, "report", *words)
        assert code == 2
        assert "give one file: decodekit report FILE" in err
