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

LAYERS = [
    # A module imports only from layers above its own. What ends in ".*" is a package whose modules
    # may import each other; "strategies", "backends" and "adapters" hold siblings that may not.
    ["errors", "stop_strings"],
    ["tree", "pool", "text", "registry", "params", "table", "signals", "noise", "versions"],
    ["chat", "token_bytes", "option_names", "padding"],
    ["bootstrap", "runs", "output_files", "pinning", "machine", "cache_dir"],
    ["stopping", "mask"],
    ["plan", "observers"],
    ["interfaces"],
    ["execution.*"],
    [
        "row_storage",
        "model_facts",
        "model_lock",
        "model_code",
        "generation_defaults",
        "filters",
        "dry",
    ],
    ["plain_forward", "snapshot"],
    ["agreement"],
    ["sampling", "runner", "processors", "constraint", "scores", "grammar_tokens"],
    ["backends.layout", "backends.merge", "backends.wide"],
    ["backends.flash_kernels", "backends.triton_kernels"],
    ["backends.triton_tiles", "backends.triton_timing", "backends.settled"],
    ["strategies", "backends", "adapters"],
    ["shaping", "guidance", "foreign", "bad_words", "model_processors", "scoring"],
    ["target", "request_logits"],
    ["verify", "rejection"],
    ["loop"],
    ["hookspecs", "prompts", "result", "models.*", "settings_files"],
    ["answer", "prompt_files"],
    ["builtins", "config", "stream", "request", "hook_answers"],
    ["settings_checks", "registration"],
    ["plugins"],
    ["schemas", "listing", "literals", "mistakes"],
    ["compose"],
    ["factory", "invariance"],
    ["decoder"],
    ["margin_bounds"],
    ["margin", "testing.*"],
    ["certificate"],
    ["independent"],
    ["generate"],
    ["bench.*", "profile.*", "certify"],
    ["stored"],
    ["cli"],
    ["__main__", "bench.__main__"],
]

EXCEPTIONS = {
    # Who imports what against the layers, and why that is no mistake.
    ("strategies.lookahead", "strategies.window"): "a part of lookahead in a file of its own",
}

OTHER_PACKAGES = {
    # Who may import what is slow or heavy; nobody else does, not even inside a function.
    "hydra": ("compose", "schemas"),
    "omegaconf": ("compose", "mistakes", "schemas"),
    "transformers": (
        "adapters.hf",
        "adapters.llama",
        "model_code",
        "models",
        "builtins",
        "decoder",
        "bench",
    ),
    "torch": (
        "mask",
        "interfaces",
        "row_storage",
        "model_facts",
        "model_code",
        "plain_forward",
        "snapshot",
        "agreement",
        "backends",
        "adapters",
        "strategies.draft_model",
        "noise",
        "sampling",
        "processors",
        "bad_words",
        "model_processors",
        "filters",
        "dry",
        "constraint",
        "guidance",
        "foreign",
        "scores",
        "shaping",
        "target",
        "rejection",
        "runner",
        "loop",
        "stream",
        "models",
        "execution",
        "machine",
        "invariance",
        "bench",
        "profile",
        "certificate",
        "independent",
        "margin",
        "margin_bounds",
        "factory",
        "testing",
    ),
    "pluggy": ("hookspecs", "hook_answers", "plugins", "registration"),
    "triton": ("backends.triton_kernels", "backends.triton_timing"),
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


def place(name: str) -> tuple[int, str]:
    """Return a module's layer, and the group within which it may import."""
    best = (-1, "", "")  # the longest match: bench.__main__ is not a part of bench here
    for layer, groups in enumerate(LAYERS):
        for group in groups:
            stem = group.removesuffix(".*")
            inside = name == stem or name.startswith(f"{stem}.")
            if inside and len(stem) > len(best[1]):
                best = (layer, stem, group)
    layer, stem, group = best
    assert layer >= 0, f"decodekit.{name} has no layer; add it to LAYERS"
    if group.endswith(".*") or stem == name:
        return layer, stem
    # A sibling is a module of the package, or one package in it, such as adapters.hf.
    return layer, ".".join(name.split(".")[: stem.count(".") + 2])


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name))
def test_imports_only_go_up(name: str) -> None:
    layer, group = place(name)
    for imported in imports(name):
        if imported == "decodekit":
            # The package itself is loaded before any of its modules: only its version is there.
            continue
        if not imported.startswith("decodekit."):
            continue
        other = imported.removeprefix("decodekit.")
        other_layer, other_group = place(other)
        fine = other_layer < layer or other_group == group or (name, other) in EXCEPTIONS
        assert fine, f"decodekit.{name} must not import decodekit.{other}"


def test_every_exception_is_needed() -> None:
    for name, other in EXCEPTIONS:
        assert f"decodekit.{other}" in set(imports(name))


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
    code = (
        "import sys, decodekit.tree, decodekit.pool, decodekit.text, decodekit.stopping, "
        "decodekit.registry, decodekit.cli, decodekit.profile, decodekit.stored; "
        "print('torch' in sys.modules)"
    )
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
        if isinstance(node, ast.ImportFrom):
            defined.update(alias.name for alias in node.names)
    assert set(listed) <= defined
    taken = {
        taken
        for other, module, taken in _names_that_modules_take()
        if other != name and module == f"decodekit.{name}" and f"{name}.{taken}" not in MODULES
    }
    assert taken <= set(listed), f"decodekit.{name}: not in __all__ but imported elsewhere"
