"""``job=profile`` over a tiny model: what is printed and stored, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decodekit.cli.main import main
from decodekit.cli.profile import StepTimes
from decodekit.cli.profile.limits import Rates
from decodekit.cli.profile.measure import StepTimer
from decodekit.errors import GenerationError


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The machine is not measured; what would have been asked of it."""
    asked: list[dict[str, Any]] = []

    def measured(size: int, **placement: Any) -> Rates:
        asked.append({"size": size, **placement})
        return Rates({"sum": 1e9 * len(asked)}, {"product": 3e9 / len(asked)})

    monkeypatch.setattr("decodekit.cli.profile.run.measure_rates", measured)
    return asked


def profile(
    capsys: pytest.CaptureFixture[str], checkpoint: str, *arguments: str
) -> tuple[int, str, str]:
    small = ("profile.rows=[1,2,5]", "profile.contexts=[6,20]", "profile.repeats=4")
    code = main(["job=profile", f"model={checkpoint}", *small, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_profile_with_all_that_is_measured(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    output = tmp_path / "curve.json"
    code, out, err = profile(capsys, checkpoint, f"profile.output={output}")
    assert code == 0
    assert "24 of 24" in err
    lines = out.splitlines()
    assert lines[0].startswith(f"{checkpoint}, float32, adapter llama, backend auto, execution ")
    assert lines[2].startswith("reads ")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[6:12]]
    assert [row[:2] for row in cells] == [[c, r] for c in ("6", "20") for r in ("1", "2", "5")]
    assert all(row[-1].endswith("%") for row in cells)
    record = json.loads(output.read_text(encoding="utf-8"))
    assert (record["format"], record["version"]) == ("decodekit-step-times", 1)
    assert record["complete"] is True
    assert record["uncounted"] is None
    assert record["settings"]["profile"]["rows"] == [1, 2, 5]
    assert record["machine"]["versions"]["torch"]
    assert [len(point["samples"]) for point in record["points"]] == [4] * 6
    assert all(point["limit"]["read_seconds"] > 0 for point in record["points"])
    assert all(rate > 0 for kind in record["rates"].values() for rate in kind.values())
    times = StepTimes.read(str(output))
    assert times.contexts == (6, 20)
    assert times.seconds(2, 20) == record["points"][4]["median"]
    assert (tmp_path / "curve.svg").read_text(encoding="utf-8").startswith("<svg")
    # The report can be had again from the file, to the letter.
    assert main(["report", str(output)]) == 0
    assert capsys.readouterr().out == out


def test_a_damaged_file_is_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    output = tmp_path / "curve.json"
    assert profile(capsys, checkpoint, f"profile.output={output}")[0] == 0
    record = json.loads(output.read_text(encoding="utf-8"))
    point = {key: value for key, value in record["points"][0].items() if key != "ratio"}
    for damage in ({"machine": None}, {"points": [point]}):
        output.write_text(json.dumps({**record, **damage}))
        assert main(["report", str(output)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"{output} is damaged: " in err


def test_limits_are_the_counts_over_the_better_rates(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    tmp_path: Path,
    rates: list[dict[str, Any]],
) -> None:
    output = tmp_path / "curve.json"
    assert profile(capsys, checkpoint, f"profile.output={output}", "adapter=hf")[0] == 0
    first, last = rates  # once before and once after
    assert first == last
    record = json.loads(output.read_text(encoding="utf-8"))
    assert first["size"] == record["points"][-1]["limit"]["bytes"]
    assert record["rates"] == {"read": {"sum": 2e9}, "arithmetic": {"product": 3e9}}
    for point in record["points"]:
        limit = point["limit"]
        assert limit["read_seconds"] == pytest.approx(limit["bytes"] / 2e9)
        assert limit["arithmetic_seconds"] == pytest.approx(limit["operations"] / 3e9)
    # Packing the weights must not hide them from the count.
    packed = tmp_path / "packed.json"
    assert profile(capsys, checkpoint, f"profile.output={packed}")[0] == 0
    again = json.loads(packed.read_text(encoding="utf-8"))
    assert again["points"][0]["limit"]["bytes"] == record["points"][0]["limit"]["bytes"]


@pytest.mark.parametrize(
    ("after", "counts"),
    [
        # Three warm-ups of six steps; then the first repeat, cut short, and the third.
        (18 + 2, None),
        (18 + 13, [2, 2, 2, 2, 2, 3]),
    ],
    ids=["first", "third"],
)
@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_what_was_measured_is_kept(
    how: str,
    after: int,
    counts: list[int] | None,
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    tmp_path: Path,
    rates: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, calls = StepTimer.seconds, 0

    def ending(self: StepTimer, context: int, rows: int) -> float:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt if how == "interrupted" else GenerationError("no memory left")
        return seconds(self, context, rows)

    monkeypatch.setattr(StepTimer, "seconds", ending)
    output = tmp_path / "curve.json"
    code, out, err = profile(capsys, checkpoint, f"profile.output={output}")
    assert code == (130 if how == "interrupted" else 1)
    assert ("no memory left" in err) == (how == "failed")
    assert "INCOMPLETE" in out
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["complete"] is False
    found = sorted(len(point["samples"]) for point in record["points"])
    assert found == (counts or [1, 1])
    StepTimes.read(str(output))
    assert (tmp_path / "curve.svg").exists()


def test_a_profile_that_measured_nothing_leaves_the_old_file(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: StepTimer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepTimer, "prepare", interrupted)
    output = tmp_path / "curve.json"
    output.write_text("precious")
    code, out, _ = profile(capsys, checkpoint, f"profile.output={output}")
    assert (code, out) == (130, "nothing was measured\n")
    assert output.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile.rows=[0]"], "rows must be 1 or more, not 0"),
        (
            ["execution=compiled", "adapter=hf"],
            "execution=compiled needs adapter=llama (the LLaMA ",
        ),
        (["profile.rows=[4,2]"], "rows must ascend: profile.rows=[2,4]"),
        (["profile.rows=4"], "profile.rows must be a list: profile.rows=[...]"),
        (["profile.contexts=[126]"], "a step of 5 rows behind 126 tokens needs 129 positions"),
        (
            ["profile.output=/nowhere/x.json"],
            "cannot write /nowhere/x.json: its directory does not",
        ),
        (["profile.output=/"], "cannot write /: it is a directory"),
        (["profile.output=x.svg"], "write profile.output=x.json"),
        (["strategy=jacobi"], "strategy does nothing under job=profile; leave it out"),
        (["profile.row=[1]"], "unknown key 'row' in 'profile': did you mean 'rows'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    rates: list[dict[str, Any]],
    arguments: list[str],
    message: str,
) -> None:
    code, out, err = profile(capsys, checkpoint, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_experts_have_times_but_no_limit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rates: list[dict[str, Any]]
) -> None:
    from tests.support.checkpoint import save_checkpoint

    directory = save_checkpoint(tmp_path / "model", kind="mixtral")
    code, out, _ = profile(capsys, directory, "profile.contexts=[6]", "profile.tree=chain")
    assert code == 0
    assert "no limit is given: which of its experts a step reads depends on the tokens" in out
    assert "(# up to the limit)" not in out
