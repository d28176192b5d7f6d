"""The table of numbers that were chosen on one machine, in docs/execution.md, is true and whole."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import decodekit

PACKAGE = Path(decodekit.__file__).parent
TABLE = re.compile(r"^\| `([\w.]+)` \| ([^|]+) \|", re.MULTILINE)
OF_NO_MACHINE = {
    # What the system defines, and not we.
    "adapters.execution.huge_pages._HUGE",
    "adapters.execution.huge_pages._GAP",
    "adapters.execution.release._DONTNEED",
}


def table() -> dict[str, object]:
    text = (PACKAGE.parent / "docs/execution.md").read_text(encoding="utf-8")
    part = text.partition("## Numbers that were chosen on one machine")[2].partition("\n## ")[0]
    return {name: ast.literal_eval(value) for name, value in TABLE.findall(part)}


def test_the_values_are_those_of_the_code() -> None:
    for name, value in table().items():
        module, _, attribute = name.rpartition(".")
        if module.endswith("Config"):
            module, _, owner = module.rpartition(".")
            holder = getattr(importlib.import_module(f"decodekit.{module}"), owner)()
        else:
            holder = importlib.import_module(f"decodekit.{module}")
        assert getattr(holder, attribute) == value, name


def test_no_number_of_kernels_is_missing() -> None:
    files = [*PACKAGE.glob("adapters/execution/**/*.py"), PACKAGE / "engine/target.py"]
    files += [*PACKAGE.glob("backends/invariant/*.py")]
    files += [PACKAGE / "backends" / f"{name}.py" for name in ("call_sizes", "float64")]
    found = set()
    for path in files:
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            numbers = [part for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            inside = (ast.Constant, ast.Tuple, ast.BinOp)
            if isinstance(node.value, inside) and all(
                isinstance(part.value, int | float) for part in numbers
            ):
                found.add(f"{module}.{node.targets[0].id}")
    found = {name for name in found if name.rpartition(".")[2].isupper()}
    assert "backends.call_sizes.FEW" in found
    missing = {name for name in found if numeric(name)} - set(table()) - OF_NO_MACHINE
    assert missing == set()


def numeric(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(f"decodekit.{module}"), attribute)
    return isinstance(value, int | float) or all(isinstance(part, int) for part in value)
