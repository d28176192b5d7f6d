"""A checkpoint's own code runs with consent for that checkpoint, and nothing asks for it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import decodekit
from decodekit import Decoder
from decodekit.config.schema import DecoderConfig
from decodekit.decoder.build import load
from decodekit.errors import CheckpointError, ConfigError, ModelSupportError
from decodekit.interfaces.component import ModelConfig
from decodekit.models.hub import fetch_repo, wanted_files
from decodekit.models.loading import load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def add_code(directory: Path, mark: Path, *, of: str = "model", before: str = "") -> None:
    """Give a checkpoint code of its own, which makes the file ``mark`` when it is run."""
    run = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    if of == "model":
        (directory / "modeling_own.py").write_text(run + MODEL)
        names = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnForCausalLM"}
        auto_map: dict[str, Any] = {
            auto: f"{before}modeling_own.{name}" for auto, name in names.items()
        }
        edit(directory / "config.json", model_type="own", auto_map=auto_map)
    else:
        (directory / "tokenization_own.py").write_text(run + TOKENIZER)
        auto_map = {"AutoTokenizer": [None, f"{before}tokenization_own.OwnTokenizer"]}
        edit(directory / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "the code ran"


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers keep its copies of such code in a directory of the test."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def run_cli(directory: Path, tmp_path: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "decodekit", f"model={directory}", "prompt=a"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    # Were a question asked on a silent pipe, transformers would wait for 15 seconds, twice.
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize("of", ["model", "tokenizer"])
def test_a_yes_on_standard_input_runs_no_code(
    tiny_llama: Path, tmp_path: Path, mark: Path, of: str
) -> None:
    add_code(tiny_llama, mark, of=of)
    done = run_cli(tiny_llama, tmp_path, input="y\ny\ny\n", timeout=120)
    assert not mark.exists()
    assert done.returncode == 2
    assert done.stdout == ""
    file = "modeling_own.py" if of == "model" else "tokenization_own.py"
    assert done.stderr == (
        f"decodekit: {tiny_llama} needs code of its own ({file}), which was not run: read it, and "
        "set model.trust_remote_code=true to run it\n"
    )


def test_nobody_is_asked_so_a_silent_pipe_is_not_waited_for(
    tiny_llama: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_code(tiny_llama, mark)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    with pytest.raises(ConfigError, match=r"set model\.trust_remote_code=true") as caught:
        load_model(tiny_llama)
    assert caught.value.key == "model.trust_remote_code"
    assert not mark.exists()


def test_a_part_of_a_model_that_names_code_is_not_asked_about(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers hands no consent, given or refused, to the models in a model."""
    from transformers import AutoModel, BertConfig, LlamaForCausalLM

    original = LlamaForCausalLM.__init__

    def composite(self: Any, config: Any) -> None:
        original(self, config)
        part = type("PartConfig", (BertConfig,), {})()  # known to no mapping
        part.auto_map = {"AutoModel": "evil.Evil"}
        AutoModel.from_config(part)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", composite)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    with pytest.raises(ConfigError, match=r"named in a part of its config\.json"):
        load_model(tiny_llama)
    with pytest.raises(ModelSupportError, match="which is never run"):
        load_model(tiny_llama, trust_remote_code=True)


def test_with_consent_the_code_of_the_directory_runs(
    tiny_llama: Path, tmp_path: Path, mark: Path
) -> None:
    expected, _ = load_model(tiny_llama)
    trusted = Path(shutil.copytree(tiny_llama, tmp_path / "trusted"))
    for of in ("model", "tokenizer"):
        add_code(trusted, mark, of=of)
    place = ModelConfig(path=str(trusted), trust_remote_code=True)
    model, tokenizer = load(DecoderConfig(model=place))
    assert mark.exists()
    assert (type(model).__name__, type(tokenizer).__name__) == ("OwnForCausalLM", "OwnTokenizer")
    rows = torch.arange(5)[None]
    assert torch.equal(model(rows).logits, expected(rows).logits)
    # Consent to one directory is none to another, though the class is known by now.
    mark.unlink()
    add_code(tiny_llama, mark)
    with pytest.raises(ConfigError, match="which was not run"):
        load(DecoderConfig(model=ModelConfig(path=str(tiny_llama))))
    assert not mark.exists()


def test_consent_to_a_model_is_none_to_its_draft(
    tiny_llama: Path, tmp_path: Path, mark: Path
) -> None:
    draft = Path(shutil.copytree(tiny_llama, tmp_path / "draft"))
    add_code(draft, mark)
    place = {"path": str(tiny_llama), "trust_remote_code": True}

    def decoder(model: object) -> Decoder:
        strategy = {"name": "draft_model", "model": model}
        return Decoder.from_config(model=place, strategy=strategy, execution="eager")

    with pytest.raises(ConfigError, match=r"^strategy\.model: .*needs code of its own") as caught:
        decoder(str(draft))
    assert caught.value.key == "strategy.model"
    assert not mark.exists()
    decoder({"path": str(draft), "trust_remote_code": True})
    assert mark.exists()


def test_known_models_that_name_code_too_load_as_transformers_has_them(
    tiny_llama: Path, mark: Path
) -> None:
    add_code(tiny_llama, mark)
    edit(tiny_llama / "config.json", model_type="llama")
    add_code(tiny_llama, mark, of="tokenizer")
    edit(tiny_llama / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    said: list[str] = []
    model, _ = load_model(tiny_llama, log=said.append)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not mark.exists()
    (line,) = said
    assert "brings a tokenizer of its own (tokenization_own.py), in whose place" in line


@pytest.mark.parametrize("elsewhere", ["owner/name--", "../", "/tmp/"])
def test_consent_covers_no_code_elsewhere(tiny_llama: Path, mark: Path, elsewhere: str) -> None:
    add_code(tiny_llama, mark, before=elsewhere)
    with pytest.raises(ConfigError, match="names code that lies elsewhere") as caught:
        load_model(tiny_llama, trust_remote_code=True)
    assert "\n" not in str(caught.value)
    assert not mark.exists()


def test_a_missing_file_of_code_is_named(tiny_llama: Path, mark: Path) -> None:
    add_code(tiny_llama, mark)
    (tiny_llama / "modeling_own.py").unlink()
    with pytest.raises(CheckpointError, match=r"lacks modeling_own\.py, the code that"):
        load_model(tiny_llama, trust_remote_code=True)


@pytest.mark.parametrize("implementation", ["evil/kernel", {"": "evil/kernel"}])
def test_an_attention_kernel_of_the_hub_is_not_fetched(
    tiny_llama: Path, implementation: object
) -> None:
    edit(tiny_llama / "config.json", text_config={"attn_implementation": implementation})
    with pytest.raises(ModelSupportError, match="asks for code from elsewhere"):
        load_model(tiny_llama, trust_remote_code=True)


@pytest.fixture
def in_hub_cache(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model as the snapshot of a commit of owner/name."""
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / COMMIT
    shutil.copytree(tiny_llama, snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:7]])
def test_code_of_a_repo_needs_a_pinned_commit(in_hub_cache: Path, revision: str | None) -> None:
    place = ModelConfig(repo="owner/name", revision=revision, trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"needs model\.revision=COMMIT beside it") as caught:
        load(DecoderConfig(model=place))
    assert (caught.value.key, caught.value.value) == ("model.revision", revision)


@pytest.mark.parametrize("before", ["", "owner/name--"])
def test_the_code_of_a_pinned_commit_runs_and_the_refusal_names_the_commit(
    in_hub_cache: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", constants.HF_HUB_CACHE)
    add_code(in_hub_cache, mark, before=before)
    with pytest.raises(ConfigError, match=f"=true and model.revision={COMMIT} to run it"):
        load(DecoderConfig(model=ModelConfig(repo="owner/name")))
    assert not mark.exists()
    place = ModelConfig(repo="owner/name", revision=COMMIT, trust_remote_code=True)
    model, _ = load(DecoderConfig(model=place))
    assert type(model).__name__ == "OwnForCausalLM"
    assert mark.exists()


def test_python_files_of_a_repo_are_fetched_only_with_consent(
    in_hub_cache: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    names = ["config.json", "model.safetensors", "modeling_own.py", "custom_generate/generate.py"]
    assert wanted_files(names) == names[:2]
    assert wanted_files(names, code=True) == sorted(names)
    add_code(in_hub_cache, mark)
    (in_hub_cache / "modeling_own.py").unlink()
    assert fetch_repo("owner/name", name="own", revision=COMMIT) == in_hub_cache
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="is only in part in the local hub cache"):
        fetch_repo("owner/name", name="own", revision=COMMIT, trust_remote_code=True)


def test_consent_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="trust_remote_code must be true or false, not 'no'"):
        ModelConfig(path="x", trust_remote_code="no")  # type: ignore[arg-type]


def calls_that_load(source: str) -> list[tuple[str, ast.Call]]:
    """Every call of a loader of transformers or of pickles, by name."""
    loaders = ("from_pretrained", "from_config", "_from_config", "pipeline", "torch.load")
    loaders += ("get_class_from_dynamic_module", "load_custom_generate", "pickle.load")
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if any(name == one or name.endswith(f".{one}") for one in loaders):
                found.append((name, node))
    return found


def test_every_load_in_the_package_says_whether_code_may_run() -> None:
    found = []
    for path in Path(decodekit.__file__).parent.rglob("*.py"):
        for name, call in calls_that_load(path.read_text(encoding="utf-8")):
            if name == "Decoder.from_config":
                continue
            found.append(name)
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            assert "trust_remote_code" in given, f"{path.name}: {name}, line {call.lineno}"
            assert ast.unparse(given["trust_remote_code"]) in ("False", "self.trusted")
    assert len(found) == 4, found  # a tokenizer and a model, from a directory and from a GGUF file


def test_pickled_weights_that_hold_more_than_tensors_do_not_load(
    tiny_llama: Path, mark: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (mark,)

    (tiny_llama / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb()}, tiny_llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="its weights cannot be read"):
        load_model(tiny_llama)
    assert not mark.exists()


def test_a_chat_template_reaches_nothing_of_python(tiny_llama: Path) -> None:
    _, tokenizer = load_model(tiny_llama)
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
