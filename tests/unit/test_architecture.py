"""Imports go one way, `import decodekit` stays light, and the public names are pinned."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import decodekit

ROOT = Path(decodekit.__file__).parent

MAY_IMPORT = {
    # Each folder or file at the top of the package, from the lowest level up, with the others that
    # it may import; docs/design.md says what may live there. Nothing imports what lies higher.
    "errors": set(),
    "interfaces": {"errors"},
    "models": {"errors"},
    "hookspecs": {"interfaces"},
    "engine": {"errors", "interfaces"},
    "backends": {"errors", "interfaces"},
    "adapters": {"errors", "interfaces", "models.cache_dir", "backends.call_sizes"},
    "strategies": {"errors", "interfaces", "engine"},
    "config": {"errors", "interfaces", "hookspecs", "engine", "backends", "adapters", "strategies"},
    "decoder": {"errors", "interfaces", "models", "engine", "adapters", "config"},
    "testing": {
        "errors",
        "interfaces",
        "engine",
        "backends.eager",
        "adapters.model_facts",
        "adapters.plain_forward",
        "strategies.autoregressive",
        "decoder",
    },
    "cli": {
        "errors",
        "interfaces",
        "hookspecs",
        "engine",
        "adapters",
        "strategies",
        "config",
        "decoder",
    },
    "": {"errors", "interfaces", "hookspecs", "config", "decoder", "cli.profile"},
    "__main__": {"cli"},
}

SIBLINGS = ("strategies", "backends", "adapters")
"""Folders whose folders and files are alternatives: one never imports another."""

SHARED = {
    # What the alternatives of a folder have in common, and so may import.
    "strategies": set(),
    "backends": {"call_sizes", "flash_kernels", "float64", "layout", "merge"},
    "adapters": {
        "agreement",
        "cache_memory",
        "execution",
        "model_code",
        "model_facts",
        "model_lock",
        "plain_forward",
        "rows",
        "snapshot",
    },
}

OTHER_PACKAGES = {
    # Who may import what is slow or heavy; nobody else does, not even inside a function.
    "hydra": ("config.compose", "config.hydra_session"),
    "omegaconf": ("config.compose", "config.hydra_session", "config.messages"),
    "transformers": (
        "adapters",
        "models",
        "decoder.decoder",
        "cli.bench",
    ),
    "torch": (
        "interfaces",
        "engine",
        "backends",
        "adapters",
        "models",
        "decoder",
        "cli",
        "testing",
        "strategies.draft_model",
    ),
    "pluggy": ("hookspecs", "config.plugins"),
    "triton": ("backends.triton",),
    "pytest": (),
}

PUBLIC = [
    "Component",
    "DecodekitError",
    "Decoder",
    "DecoderConfig",
    "GenerationResult",
    "GenerationStats",
    "GenerationStream",
    "Request",
    "SamplingParams",
    "StepTimes",
    "TextChunk",
    "TextScore",
    "TokenTree",
    "__version__",
    "hookimpl",
]


def modules() -> dict[str, Path]:
    """Return every module's name, without "decodekit.", and file."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """Yield what a module imports: at the top, inside functions, and for type checking only."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            assert node.module is not None
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                is_module = longer.removeprefix("decodekit.") in MODULES
                yield longer if is_module else node.module


def inner_imports(name: str) -> Iterator[str]:
    """Yield the modules of decodekit that a module imports, without "decodekit."."""
    for other in imports(name):
        if other.split(".")[0] == "decodekit":
            yield other.removeprefix("decodekit").removeprefix(".")


def is_part(name: str, of: str) -> bool:
    """Return whether a module is ``of`` or lies in it."""
    return name == of or name.startswith(f"{of}.")


def test_the_top_of_the_package_has_twelve_entries() -> None:
    tops = {name.split(".")[0] for name in MODULES}
    assert tops == set(MAY_IMPORT)
    assert len(tops - {"", "__main__"}) == 12


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_what_its_folder_may(name: str) -> None:
    folder = name.split(".")[0]
    for other in inner_imports(name):
        if other.split(".")[0] == folder:
            continue
        assert any(is_part(other, allowed) for allowed in MAY_IMPORT[folder]), other


def test_nothing_that_a_folder_may_import_lies_above_it() -> None:
    order = list(MAY_IMPORT)
    for folder, allowed in MAY_IMPORT.items():
        for other in allowed:
            assert order.index(other.split(".")[0]) < order.index(folder)
            assert any(
                is_part(imported, other)
                for name in MODULES
                if name.split(".")[0] == folder
                for imported in inner_imports(name)
            ), f"{folder} does not import {other}: take it off the list"


@pytest.mark.parametrize("folder", SIBLINGS)
def test_an_alternative_never_imports_another(folder: str) -> None:
    for name in MODULES:
        if not name.startswith(f"{folder}."):
            continue
        own = name.split(".")[1]
        for other in inner_imports(name):
            if other.startswith(f"{folder}."):
                assert other.split(".")[1] in {own, *SHARED[folder]}, (name, other)


def test_no_module_imports_itself_by_way_of_others() -> None:
    state: dict[str, str] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == "done":
            return
        assert state.get(name) != "open", " -> ".join([*path, name])
        state[name] = "open"
        for other in inner_imports(name):
            if other != name:
                visit(other, (*path, name))
        state[name] = "done"

    for name in MODULES:
        # The face of a package loads its modules when asked, so it is in no circle.
        if MODULES[name].name != "__init__.py":
            visit(name, ())


def test_the_package_itself_imports_nothing_but_errors_before_it_is_asked() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    top = [
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("decodekit")
    ]
    assert top == ["decodekit.errors"]


@pytest.mark.parametrize("package", OTHER_PACKAGES)
def test_only_some_modules_import_what_is_heavy(package: str) -> None:
    allowed = OTHER_PACKAGES[package]
    users = {
        name for name in MODULES if any(other.split(".")[0] == package for other in imports(name))
    }
    strangers = {
        name for name in users if not any(f"{name}.".startswith(f"{stem}.") for stem in allowed)
    }
    assert strangers == set()
    unused = {
        stem for stem in allowed if not any(f"{name}.".startswith(f"{stem}.") for name in users)
    }
    assert unused == set(), "take it off the list"


def test_importing_decodekit_is_light() -> None:
    """In a fresh interpreter, since this one has imported everything already."""
    code = (
        "import sys, decodekit; dir(decodekit); "
        "heavy = {'hydra', 'omegaconf', 'transformers', 'torch', 'triton', 'numpy', 'pluggy'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_testing_kit_needs_no_pytest() -> None:
    code = "import sys, decodekit.testing; print('pytest' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_the_types_of_a_step_need_no_torch() -> None:
    names = (
        "interfaces.tree",
        "strategies.lookahead.pool",
        "engine.detokenizer",
        "engine.stopping",
        "config.plugins.registry",
        "cli.main",
        "cli.profile",
        "cli.report",
    )
    loaded = ", ".join(f"decodekit.{name}" for name in names)
    code = f"import sys, {loaded}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_the_public_names_are_these() -> None:
    assert sorted(decodekit.__all__) == PUBLIC
    assert sorted(dir(decodekit)) == PUBLIC
    for name in PUBLIC:
        assert getattr(decodekit, name) is not None
    assert set(PUBLIC) - {"__version__", "DecodekitError"} == set(decodekit._LAZY)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'decodekit' has no attribute 'Decodr'"):
        decodekit.Decodr  # noqa: B018


@cache
def _names_that_modules_take() -> list[tuple[str, str | None, str]]:
    """Return who takes which name from which module."""
    return [
        (name, node.module, alias.name)
        for name, path in MODULES.items()
        if name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name))
def test_every_public_name_of_a_module_is_there(name: str) -> None:
    """``__all__`` holds names that exist, sorted, and whatever others import is in it."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    listed: list[str] = []
    defined: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names == ["__all__"] and isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
        defined.update(names)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
        if isinstance(node, ast.ImportFrom | ast.If):  # also those for type checking only
            taken_in = [inner for inner in ast.walk(node) if isinstance(inner, ast.ImportFrom)]
            defined.update(alias.name for inner in taken_in for alias in inner.names)
    assert set(listed) <= defined
    taken = {
        taken
        for other, module, taken in _names_that_modules_take()
        if other != name and module == f"decodekit.{name}" and f"{name}.{taken}" not in MODULES
    }
    assert taken <= set(listed), f"decodekit.{name}: not in __all__ but imported elsewhere"
