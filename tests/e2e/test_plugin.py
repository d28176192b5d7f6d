"""A plugin as a third party writes it, installed next to decodekit in an environment of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SOURCES = ("decodekit", "conf", "pyproject.toml", "README.md", "LICENSE")


class Environment:
    """A fresh environment with decodekit and the plugin, both installed as a user installs them.

    torch and the like are those of the environment that runs the tests: its directories are on the
    path, but not its own decodekit.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.plugin = home / "plugin"
        venv = home / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        self.bin = venv / "bin"
        shared = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text("\n".join(shared))
        # Copies, since building leaves files behind.
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        for name in SOURCES:
            source, target = ROOT / name, home / "decodekit" / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignored)
            else:
                target.parent.mkdir(exist_ok=True)
                shutil.copy(source, target)
        shutil.copytree(ROOT / "tests" / "plugin", self.plugin, ignore=ignored)
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "-q"]
        options = ["--disable-pip-version-check", "--no-deps", "--ignore-installed"]
        subprocess.run([*pip, *options, home / "decodekit", self.plugin], check=True)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of the environment's programs."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            capture_output=True,
            text=True,
            encoding="utf-8",
            cwd=self.plugin,
            env={**clean, **variables},
            timeout=300,
            check=False,
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("third-party"))


def test_both_are_installed_and_not_taken_from_the_sources(environment: Environment) -> None:
    code = (
        "import decodekit, decodekit_example; print(decodekit.__file__, decodekit_example.__file__)"
    )
    done = environment.run("python", "-c", code)
    assert done.stdout.count(str(environment.home / "venv")) == 2, done.stderr


def test_the_list_says_where_everything_came_from(environment: Environment) -> None:
    done = environment.run("decodekit", "plugins")
    assert done.returncode == 0, done.stderr
    rows = re.sub(r"[ |]+", " ", done.stdout)
    for entry in (
        "strategy words",
        "backend merged",
        "adapter example-bytes",
        "model example-bytes",
        "strategy words-long",
    ):
        assert f"{entry} example decodekit-example 0.1.0" in rows
    assert "strategy lookahead decodekit decodekit" in rows
    listed = json.loads(environment.run("decodekit", "plugins", "format=json").stdout)
    assert [plugin["name"] for plugin in listed["plugins"]] == ["decodekit", "example"]
    help_ = environment.run("decodekit", "--help").stdout
    assert re.search(r"strategy=NAME .*words", help_)
    assert "example-bytes" in help_


def answer(environment: Environment, *settings: str) -> Any:
    done = environment.run("decodekit", "format=json", "prompt=The model ", *settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_strategy_on_its_model(environment: Environment) -> None:
    mine = ("strategy=words", "model=example-bytes", "max_new_tokens=100")
    found = answer(environment, *mine, "compare=true")
    assert (found["model"], found["strategy"]["name"]) == ("example-bytes", "words")
    assert found["compare"]["equal"] is True
    assert len(found["tokens"]) == 100
    assert found["stats"]["steps"] < 100
    assert answer(environment, *mine, "backend=merged")["text"] == found["text"]
    assert answer(environment, *mine[1:], "strategy=lookahead")["text"] == found["text"]
    longer = answer(environment, "strategy=words-long", "strategy.min_letters=1", *mine[1:])
    assert longer["text"] == found["text"]
    assert longer["strategy"] == {"name": "words", "num_tokens": 16, "min_letters": 1}


def test_its_strategy_on_a_model_of_decodekit(environment: Environment) -> None:
    found = answer(environment, "strategy=words", "max_new_tokens=8", "compare=true")
    assert found["model"] == "smollm2-135m"
    assert found["compare"]["equal"] is True


def test_it_can_be_switched_off(environment: Environment) -> None:
    off = {"DECODEKIT_DISABLE_PLUGINS": "example"}
    done = environment.run("decodekit", "strategy=words", "prompt=x", **off)
    assert done.returncode == 2
    assert done.stderr.startswith("decodekit: unknown strategy 'words'")
    listed = environment.run("decodekit", "plugins", **off)
    assert "switched off by DECODEKIT_DISABLE_PLUGINS: example" in listed.stdout


def test_its_own_tests_pass(environment: Environment) -> None:
    done = environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
