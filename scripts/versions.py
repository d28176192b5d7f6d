"""Run the tests beside other versions of what decodekit stands on, and write docs/versions.md.

    python scripts/versions.py [ROW ...]     all rows, or these; `make versions` runs all

Run it with the Python of an environment that has the versions of constraints.txt. Each row gets an
environment under .venv-versions, with a log in it: the packages that differ, over those of this
one. A row for another Python is on its own. A row that was not run keeps what the page says of it.
The rows with another torch, or another Python and torch, fetch several GB.

The exit code is 1 if a test failed or something could not be installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from decodekit.decoder.versions import OPTIONAL, REQUIRED  # noqa: E402

ENVIRONMENTS = ROOT / ".venv-versions"
PAGE = ROOT / "docs" / "versions.md"

ALL = {**REQUIRED, **OPTIONAL}

# transformers decides on these: of each the lowest that the lowest transformers takes.
DICTATED = {"huggingface_hub": "1.5.0", "safetensors": "0.8.0", "tokenizers": "0.23.1"}

TESTS = (
    "tests/unit/decoder/test_versions.py",
    "tests/unit/config/test_compose.py",
    "tests/unit/decoder/test_grammar.py",
    "tests/unit/adapters",
    "tests/unit/models",
    "tests/behaviour/test_lossless.py",
    "tests/behaviour/test_architectures.py",
)

# These import no torch. The shared conftest.py does.
TORCHLESS = (
    "--noconftest",
    "tests/unit/cli/test_bootstrap.py",
    "tests/unit/test_errors.py",
    "tests/unit/config/test_registry.py",
    "tests/unit/interfaces/test_tree.py",
    "tests/unit/decoder/test_versions.py",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: What is different, in words.
        packages: What pip is asked for; nothing means the environment as it is.
        python: Another Python, as "3.12"; "" for the one that runs this script.
        tests: What pytest is given.
    """

    what: str
    packages: tuple[str, ...] = ()
    python: str = ""
    tests: tuple[str, ...] = TESTS


def lowest(name: str) -> str:
    """Return the requirement of a package's lowest version."""
    return f"{name}=={ALL[name].lowest}"


def within(name: str) -> str:
    """Return the requirement of any version that is admitted."""
    return f"{name}>={ALL[name].lowest},<{ALL[name].end}"


BUT_TORCH = [name for name in ALL if name != "torch"]
LOWEST = (*map(lowest, BUT_TORCH), *(f"{name}=={least}" for name, least in DICTATED.items()))

ROWS = {
    "pinned": Row(what="constraints.txt"),
    "lowest": Row(what="the lowest of all but torch", packages=LOWEST),
    "highest": Row(
        what="the highest of all but torch",
        packages=("--upgrade", *map(within, BUT_TORCH), *DICTATED),
    ),
    "torch-lowest": Row(what="the lowest torch", packages=(lowest("torch"),)),
    "torch-highest": Row(what="the highest torch", packages=("--upgrade", within("torch"))),
    **{
        f"transformers-{minor}": Row(
            what=f"transformers {minor}", packages=(f"transformers=={minor}.*",)
        )
        for minor in ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23")
    },
    **{
        f"python-{minor}": Row(
            what=f"Python {minor}, what needs no torch",
            packages=("-c", "constraints.txt", "pytest", "hypothesis", "pluggy"),
            python=minor,
            tests=TORCHLESS,
        )
        for minor in ("3.10", "3.12", "3.13")
    },
    **{
        f"python-{minor}-torch": Row(
            what=f"Python {minor}", packages=("-c", "constraints.txt", ".[test]"), python=minor
        )
        for minor in ("3.10", "3.12", "3.13")
    },
}


def main(names: Sequence[str]) -> int:
    """Run rows, all if none is named; write the page; return the exit code."""
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        print(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    code = 0
    for name in names or ROWS:
        print(f"{name}: {ROWS[name].what}", flush=True)
        versions, result = run(name, ROWS[name])
        print(f"    {result}", flush=True)
        code |= not re.match(r"\d+ passed", result)
        cells = {name: (ROWS[name].what, versions, result)}
        PAGE.write_text(page(cells, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return code


def run(name: str, row: Row) -> tuple[str, str]:
    """Run one row; return the versions that it had and what came out, as the table says them."""
    place = ENVIRONMENTS / name
    shutil.rmtree(place, ignore_errors=True)
    base = interpreter(row.python)
    if base is None:
        return "", "no such interpreter here"
    place.mkdir(parents=True)
    with (place / "log").open("w", encoding="utf-8") as log:
        if not made(place, base, row, log):
            return "", f"cannot be installed; see {place.relative_to(ROOT)}/log"
        python = place / "bin" / "python"
        if row.python and called(log, python, "-m", "compileall", "-q", "decodekit"):
            return versions_of(python, ["python"]), "a file cannot be compiled"
        # Old packages warn of each other's age, which is none of our business.
        old = "ignore::DeprecationWarning"
        options = ("-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", "-W", old)
        called(log, python, "-m", "pytest", *options, *row.tests)
    said = re.findall(r"^(?:\d+ \w+, )*\d+ \w+(?= in )", (place / "log").read_text(), re.M)
    asked = ["python"] if row.python else []
    return versions_of(python, [*asked, *ALL, *DICTATED]), said[-1] if said else "no test ran"


def interpreter(minor: str) -> str | None:
    """Return a command that is Python ``minor``: on the path, or of pyenv; None if none is."""
    if not minor:
        return sys.executable
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/python"))
    for command in (f"python{minor}", *map(str, of_pyenv)):
        found = shutil.which(command)
        if found and subprocess.run([found, "-V"], capture_output=True).returncode == 0:
            return found
    return None


def made(place: Path, base: str, row: Row, log: TextIO) -> bool:
    """Make the environment of a row; return whether that worked."""
    if called(log, base, "-m", "venv", str(place), *([] if row.python else ["--without-pip"])):
        return False
    python = place / "bin" / "python"
    if not row.python:  # what is not installed here is found there
        ours = sysconfig.get_path("purelib")
        inside = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        line = f"import site; site.addsitedir({ours!r})\n"  # and what its own .pth files say
        (inside / "site-packages" / "ours.pth").write_text(line, encoding="utf-8")
    if not row.packages:
        return True
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    return called(log, *pip, "install", "--no-compile", *row.packages) == 0


def called(log: TextIO, *command: str | Path) -> int:
    """Run a command in the repository's root and return its exit code; its output is kept."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        check=False,
    ).returncode


def versions_of(python: Path, names: Iterable[str]) -> str:
    """Return the versions of packages that differ from those of constraints.txt, as a list."""
    code = (
        "import platform, sys\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, platform.python_version() if name == 'python' else version(name))\n"
        "    except PackageNotFoundError: pass\n"
    )
    done = subprocess.run(
        [str(python), "-c", code, *names], capture_output=True, text=True, check=True
    )
    pins = re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    pinned = {name.lower(): version for name, version in pins}
    found = (line.split() for line in done.stdout.splitlines())
    return ", ".join(
        f"{name} {version}"
        for name, version in found
        if pinned.get(name.lower()) != version.partition("+")[0]
    )


def page(cells: dict[str, tuple[str, str, str]], text: str) -> str:
    """Return the page with these rows of its table new; ``text`` is what it says now."""
    rows = dict(re.findall(r"^\| `([\w.-]+)` (\|.*\|)$", text, re.M))
    rows |= {name: f"| {' | '.join(columns)} |" for name, columns in cells.items()}
    lines = [f"| `{name}` {rows[name]}" for name in ROWS if name in rows]
    head, _, rest = text.partition("<!-- rows -->\n")
    _, _, tail = rest.partition("<!-- end of rows -->")
    table = [
        "| row | what | versions other than in constraints.txt | result |",
        "|---|---|---|---|",
    ]
    return "\n".join([f"{head}<!-- rows -->", *table, *lines, f"<!-- end of rows -->{tail}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
