"""What is installed beside decodekit: refused in one line where it is too old or too new."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from decodekit.decoder import versions
from decodekit.decoder.versions import OPTIONAL, REQUIRED, check_optional, check_versions
from decodekit.errors import DependencyError

ROOT = Path(__file__).parents[3]


def installed(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    """Let these versions be installed, whatever is."""
    monkeypatch.setattr(versions, "version", lambda name: found.get(name, REQUIRED[name].lowest))
    check_versions.cache_clear()


def test_another_transformers_is_refused_in_one_line_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, transformers="5.10.0")
    with pytest.raises(DependencyError) as caught:
        check_versions()
    bounds = REQUIRED["transformers"]
    assert str(caught.value) == (
        f"decodekit needs transformers {bounds.lowest} to 5.x; 5.10.0 is installed: "
        f"pip install 'transformers>={bounds.lowest},<6'"
    )
    assert (caught.value.package, caught.value.found) == ("transformers", "5.10.0")
    with pytest.raises(ImportError):  # what whoever guards an import expects
        check_versions()


@pytest.mark.parametrize(
    ("name", "found", "fine"),
    [
        ("transformers", "4.57.6", False),
        ("transformers", "5.16.0", True),
        ("transformers", "5.100.0", True),
        ("transformers", "5.30.0.dev0", True),
        ("transformers", "6.0.0", False),
        ("torch", "2.13.0+cu130", True),
        ("torch", "2.20.0a0+git1234567", True),
        ("torch", "2.1.2", False),
        ("pyyaml", "6.0", True),
        ("pyyaml", "6", True),
        ("hydra-core", "1.3.1", False),
        ("numpy", "a build without a number", True),
    ],
)
def test_versions_are_compared_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str, fine: bool
) -> None:
    installed(monkeypatch, **{name: found})
    if fine:
        check_versions()
        return
    with pytest.raises(DependencyError, match=re.escape(f"needs {name} {REQUIRED[name].lowest}")):
        check_versions()


def test_what_is_installed_here_is_admitted() -> None:
    check_versions.cache_clear()
    check_versions()
    for name in OPTIONAL:
        check_optional(name)


def run_beside(
    tmp_path: Path, transformers: str, *command: str
) -> subprocess.CompletedProcess[str]:
    """Run Python where pip would say that this ``transformers`` is installed."""
    info = tmp_path / f"transformers-{transformers}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {transformers}\n", encoding="utf-8"
    )
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
    return subprocess.run(
        [sys.executable, "-c", code + command[0], *command[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_refuses_before_it_imports_anything(tmp_path: Path) -> None:
    main = "from decodekit.cli.main import main; code = main(); "
    main += "print(sorted({'torch', 'transformers', 'hydra'} & set(sys.modules))); sys.exit(code)"
    done = run_beside(tmp_path, "5.10.0", main, "prompt=Hello")
    assert done.returncode == 1
    assert done.stdout == "[]\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("decodekit: decodekit needs transformers ")
    assert "; 5.10.0 is installed: pip install 'transformers>=" in line


def test_the_package_refuses_where_a_name_is_first_used_and_not_when_it_is_imported(
    tmp_path: Path,
) -> None:
    code = "import decodekit; print(decodekit.__version__); from decodekit import Decoder"
    done = run_beside(tmp_path, "6.1.0", code)
    assert done.returncode == 1
    assert done.stdout.strip()
    assert "6.1.0 is installed" in done.stderr.splitlines()[-1]


def test_the_bounds_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, bounds in {**REQUIRED, **OPTIONAL}.items():
        assert f'"{name}>={bounds.lowest},<{bounds.end}"' in text
    listed = re.search(r"^dependencies = \[$(.*?)^\]$", text, re.M | re.S)
    assert listed is not None
    assert set(re.findall(r'^  "([\w-]+)', listed[1], re.M)) == set(REQUIRED)


def test_the_documentation_names_the_bounds() -> None:
    text = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    for name, bounds in {**REQUIRED, **OPTIONAL}.items():
        assert f"| {name} | {bounds.lowest} | {bounds.end} |" in text
