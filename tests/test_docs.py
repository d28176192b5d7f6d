"""What the documentation shows works."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import scaled_dot_product_attention

from decodekit import Component, Decoder, hookspecs, testing
from decodekit.cli.profile.record import FORMAT, point_record, write_record
from decodekit.config.plugins.installed import registry
from decodekit.config.schema import ProfileConfig
from decodekit.decoder.decoder import Decoder as DecoderClass
from decodekit.hookspecs import API_VERSION
from decodekit.interfaces.component import ModelConfig
from decodekit.interfaces.events import StepEvent
from tests.support.checkpoint import save_checkpoint
from tests.support.tiny import greedy_loop, tiny_model

ROOT = Path(__file__).parents[1]
STRATEGIES = registry().names("strategy")


def blocks(file: str, language: str = "python") -> list[str]:
    """Return the code blocks of a Markdown file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_strategy_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("decodekit_lines")
    monkeypatch.setitem(sys.modules, "decodekit_lines", module)
    strategy, usage = blocks("docs/strategies.md")
    exec(strategy, module.__dict__)
    (component,) = module.decodekit_register_strategies()
    assert isinstance(component, Component)
    built = component.build(component.config(newline=62, num_tokens=4), None)
    model = tiny_model()
    prompt = [62, 5, 6, 7, 8, 62, 5]
    decoder = Decoder.from_model(model, strategy=built)
    assert decoder.generate(prompt, max_new_tokens=40).tokens == greedy_loop(model, prompt, 40)
    assert decoder.generate(prompt, max_new_tokens=40).stats.nodes > 0
    assert "Decoder.from_model(model, tokenizer, strategy=Lines" in usage


def test_the_architecture_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, test, package, watch = blocks("docs/plugins.md")
    assert len([line for line in code.splitlines() if line.strip()]) < 100
    module = types.ModuleType("decodekit_tiny")
    monkeypatch.setitem(sys.modules, "decodekit_tiny", module)
    for block in (code, test, package):
        exec(block, module.__dict__)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = module.Model()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)

    def plain_logits(tokens: Any) -> torch.Tensor:
        def causal(layer: int, *states: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(*states, is_causal=True).transpose(1, 2)

        with torch.no_grad():
            rows = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], causal)
        return rows[0, -1]

    module.test_the_adapter(model, plain_logits)
    torch.save(model.state_dict(), tmp_path / "tiny-1m.pt")
    (component,) = module.decodekit_register_adapters()
    assert component.config().name == component.name == "tiny"
    assert module.decodekit_api_version == API_VERSION
    assert module.decodekit_config_package() == "decodekit_tiny.conf"
    place = ModelConfig(path=str(tmp_path / "tiny-1m.pt"))
    loaded, tokenizer = component.load(component.config(), place, dtype="auto", device="auto")
    assert tokenizer is None
    assert component.build(component.config(), loaded, None).vocab_size == 64
    (yaml_text,) = blocks("docs/plugins.md", "yaml")
    assert ModelConfig(**yaml.safe_load(yaml_text)).adapter == "tiny"
    exec(watch, module.__dict__)
    assert isinstance(module.decodekit_step_finished, types.FunctionType)


def test_the_hooks_of_the_guide_are_all_there_are() -> None:
    text = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(decodekit_\w+)", text, re.M))
    assert listed == {name for name in dir(hookspecs) if name.startswith("decodekit_")}
    checks = set(re.findall(r"^\| `(check_\w+)", text, re.M))
    assert checks == {name for name in testing.__all__ if name.startswith("check_")}
    fields = ", ".join(StepEvent.__dataclass_fields__)
    assert fields in " ".join(text.split())


def test_the_python_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny model instead of the one that it names."""
    checkpoint = save_checkpoint(tmp_path)
    load = DecoderClass.from_config
    monkeypatch.setattr(
        DecoderClass,
        "from_config",
        lambda **settings: load(**{**settings, "model": checkpoint}),
    )
    first, second = blocks("README.md")
    scope: dict[str, Any] = {}
    exec(first, scope)
    assert len(scope["result"].tokens) == 64
    scope["model"], scope["tokenizer"] = tiny_model(), scope["decoder"].tokenizer
    exec(second, scope)
    assert scope["decoder"].strategy.config.window_size == 15
    assert capsys.readouterr().out


def test_the_requests_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = Decoder.from_config(model=save_checkpoint(tmp_path))
    monkeypatch.setattr(DecoderClass, "from_config", lambda **_: decoder)
    decoder.tokenizer.pad_token = "<u>"  # this one has no end-of-text token that could pad
    scope: dict[str, Any] = {}
    for block in blocks("docs/requests.md"):
        exec(block, scope)
    assert len(scope["result"].logprobs) == len(scope["result"].tokens) == 40
    assert [len(result.tokens) for result in scope["results"]] == [30, 30, 30]
    assert capsys.readouterr().out


def test_the_profile_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [
        point_record(context, rows, [seconds], base=[0.03], limit=None)
        for context in (256, 1024)
        for rows, seconds in ((1, 0.03), (64, 0.1))
    ]
    write_record(str(tmp_path / "curve.json"), {"format": FORMAT, "version": 1, "points": points})
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/profile.md")
    exec(code, {})
    assert float(capsys.readouterr().out) == pytest.approx(1 + 12 / 63 * 7 / 3)
    text = (ROOT / "docs/profile.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `profile\.(\w+)` \| `?([^`|]+?)`? \|", text, re.M))
    defaults = {
        name: "none" if value is None else str(value).replace(" ", "").replace("True", "true")
        for name, value in asdict(ProfileConfig()).items()
    }
    assert listed == defaults


def test_links_in_the_documentation_lead_somewhere() -> None:
    for file in ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        text = (ROOT / file).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert ((ROOT / file).parent / target).exists(), f"{file}: {target}"


def test_the_map_of_the_readme_names_files_that_exist() -> None:
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row):
            places = [ROOT / name, ROOT / "decodekit" / name]
            known = any(place.exists() for place in places)
            assert known or name in STRATEGIES, name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
