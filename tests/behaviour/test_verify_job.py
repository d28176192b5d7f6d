"""``job=verify`` over a tiny model: the report, the exit code, and a plugin's strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decodekit.cli.main import main
from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.interfaces import Accepted


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "x1", "task": "letters", "prompt": "a b c"},
        {"id": "x2", "task": "letters", "prompt": "d e f"},
        {"id": "y1", "task": "ids", "input_ids": [5, 6, 7]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def verify(
    capsys: pytest.CaptureFixture[str], checkpoint: str, *arguments: str
) -> tuple[int, str, str]:
    code = main(["job=verify", f"model={checkpoint}", "max_new_tokens=12", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table(capsys: pytest.CaptureFixture[str], checkpoint: str, prompts: str) -> None:
    code, out, err = verify(capsys, checkpoint, f"verify.prompts={prompts}")
    assert code == 0
    lines = out.splitlines()
    assert lines.pop(2).startswith("the last bits of a row may depend on other rows: ")
    assert lines.pop(2) == ""
    assert lines == [
        f"lookahead (llama, auto) against autoregressive (auto), {checkpoint}, float32, "
        "tie up to 0.0001",
        "",
        "|         | prompts | tokens | equal | tie | defect |",
        "|---------|--------:|-------:|------:|----:|-------:|",
        "| letters |       2 |     24 |     2 |   0 |      0 |",
        "| ids     |       1 |     12 |     1 |   0 |      0 |",
        "| total   |       3 |     36 |     3 |   0 |      0 |",
        "",
        "autoregressive against the model's own forward pass: 3 equal, 0 tie, 0 defect",
    ]
    assert "3 of 3" in err


@pytest.mark.parametrize(
    "settings",
    [
        ["strategy=jacobi", "backend=eager"],
        ["strategy=prompt_lookup", "sampling=sample", "seed=4"],
        ["sampling.repetition_penalty=1.3", "sampling.no_repeat_ngram_size=2", "stop=w5"],
        ["verifier=rejection", "verify.backend=eager"],
        ["stop_token_ids=[[9,9],12]", "dtype=float64"],
    ],
)
def test_json(
    capsys: pytest.CaptureFixture[str], checkpoint: str, prompts: str, settings: list[str]
) -> None:
    code, out, _ = verify(
        capsys, checkpoint, f"verify.prompts={prompts}", "format=json", "verify.limit=1", *settings
    )
    assert code == 0
    report = json.loads(out)
    assert [one["id"] for one in report["prompts"]] == ["x1", "y1"]
    assert (report["equal"], report["tie"], report["defect"]) == (2, 0, 0)
    assert report["independent"] == {"equal": 2, "tie": 0, "defect": 0}
    assert {one["independent"]["kind"] for one in report["prompts"]} == {"equal"}
    assert report["complete"] is True
    assert "rows" in report["invariance_obstacle"] or "packed" in report["invariance_obstacle"]
    assert report["dtype"] == ("float64" if "dtype=float64" in settings else "float32")
    if "verify.backend=eager" in settings:
        assert (report["backend"], report["reference_backend"]) == ("auto", "eager")


def test_one_prompt_from_the_command_line(
    capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    code, out, _ = verify(capsys, checkpoint, "prompt=a b c")
    assert code == 0
    assert "| prompt |       1 |     12 |     1 |   0 |      0 |" in out


def test_a_defect_is_exit_code_1_and_is_shown(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A verifier that accepts a wrong token wherever a strategy proposes one."""
    right = ExactMatchVerifier.verify

    def careless(self: ExactMatchVerifier, proposal, target):  # type: ignore[no-untyped-def]
        if not proposal.tree:
            return right(self, proposal, target)
        accepted = [Accepted(proposal.tree.tokens[0], 0), Accepted(target.after(0), None)]
        return iter(accepted)

    monkeypatch.setattr(ExactMatchVerifier, "verify", careless)
    code, out, _ = verify(capsys, checkpoint, f"verify.prompts={prompts}", "strategy=jacobi")
    assert code == 1
    assert "| total   |       3 |     36 |     0 |   0 |      3 |" in out
    assert "| prompt | token | expected | got |" in out
    code, out, _ = verify(
        capsys, checkpoint, f"verify.prompts={prompts}", "strategy=jacobi", "format=json"
    )
    assert code == 1
    first = json.loads(out)["prompts"][0]
    assert first["kind"] == "defect"
    assert first["divergences"][-1]["gap"] > 0.0001
    # With all the tolerance in the world it would be a tie.
    code, _, _ = verify(
        capsys, checkpoint, "prompt=a b c", "strategy=jacobi", "verify.tolerance=1000"
    )
    assert code == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "give prompts: verify.prompts=FILE.jsonl, or one: prompt="),
        (["verify.prompts=PROMPTS", "prompt=a"], "give verify.prompts or a prompt, not both"),
        (["verify.prompts=nowhere.jsonl"], "cannot read the prompts in nowhere.jsonl"),
        (["prompt=a", "verify.tolerance=-1"], "tolerance must be 0 or more"),
        (["prompt=a", "verify.tolerance=inf"], "tolerance must be 0 or more, and finite"),
        (["prompt=a", "stop_token_ids=[9999]"], "must be token ids of the model"),
        (["prompt=a", "max_new_tokens=0"], "max_new_tokens must be 1 or more"),
        (["prompt=a", "verify.backend=fast"], "unknown backend 'fast'"),
        (
            ["prompt=a", "verifier=rejection", "sampling=sample"],
            "the same distribution, not the same tokens",
        ),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    prompts: str,
    settings: list[str],
    message: str,
) -> None:
    code, out, err = verify(
        capsys, checkpoint, *(one.replace("PROMPTS", prompts) for one in settings)
    )
    assert (code, out) == (2, "")
    assert message in err
    assert err.strip().count("\n") == 0


def test_an_interruption_reports_what_was_judged(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from decodekit import Decoder

    generate = Decoder.generate
    calls = 0

    def interrupted(self, *arguments, **options):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "generate", interrupted)
    code, out, _ = verify(capsys, checkpoint, f"verify.prompts={prompts}", "format=json")
    assert code == 130
    report = json.loads(out)
    assert [one["id"] for one in report["prompts"]] == ["x1"]
    assert report["complete"] is False


def test_an_incomplete_report_says_so(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model breaks down at the second prompt; the verdict on the first is not lost."""
    from decodekit import Decoder
    from decodekit.errors import GenerationError

    generate = Decoder.generate

    def breaking(self, prompt, **options):  # type: ignore[no-untyped-def]
        if breaking.calls == 2:
            raise GenerationError("step 3: the model returned NaN or infinite logits")
        breaking.calls += 1
        return generate(self, prompt, **options)

    breaking.calls = 0
    monkeypatch.setattr(Decoder, "generate", breaking)
    code, out, err = verify(capsys, checkpoint, f"verify.prompts={prompts}")
    assert code == 1
    assert "INCOMPLETE: 1 of 3 prompts were judged" in out
    assert "| letters |       1 |     12 |     1 |   0 |      0 |" in out
    assert err.splitlines()[-1].startswith("decodekit: prompt 'x2': step 3: the model returned NaN")
    breaking.calls = 2
    code, out, _ = verify(capsys, checkpoint, f"verify.prompts={prompts}")
    assert (code, "INCOMPLETE: 0 of 3" in out, "|" in out) == (1, True, False)


def test_every_prompt_is_looked_at_before_any_is_run(
    capsys: pytest.CaptureFixture[str], checkpoint: str, prompts: str
) -> None:
    with Path(prompts).open("a") as file:
        file.write('\n{"id": "bad", "input_ids": [70000]}\n')
    code, out, err = verify(capsys, checkpoint, f"verify.prompts={prompts}")
    assert (code, out) == (2, "")
    assert "prompt 'bad': token id 70000 is outside the vocabulary" in err
