"""What hostile use has brought to light: each was a bug once."""

from __future__ import annotations

import copy
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from decodekit import Decoder
from decodekit.adapters.execution.packed import PackedLinear, can_pack
from decodekit.adapters.hf.attention import attention_of
from decodekit.cli.bench.contenders import baseline
from decodekit.cli.main import main
from decodekit.config.compose import compose_config, compose_mapping
from decodekit.decoder.build import prepare_execution
from decodekit.errors import BackendError, ConfigError, GenerationError, TreeError
from decodekit.interfaces import Proposal
from decodekit.interfaces.tree import TokenTree
from decodekit.strategies.autoregressive import Autoregressive
from tests.support.checkpoint import save_checkpoint
from tests.support.fakes import ToyAdapter, ToyCache, plain_decode
from tests.support.tiny import VOCABULARY, greedy_loop, random_prompt, tiny_model

PROMPT = [3, 1, 4, 1, 5]


def test_a_decoder_goes_on_after_an_allocation_failed() -> None:
    class Small(ToyAdapter):
        def forward(self, plans: Any, cache: ToyCache) -> Any:
            if cache.capacity > 1000:
                raise GenerationError("no memory for a cache")
            return super().forward(plans, cache)

    decoder = Decoder(Small(), strategy=Autoregressive())
    with pytest.raises(GenerationError, match="no memory"):
        decoder.generate(PROMPT, max_new_tokens=5000)
    result = decoder.generate(PROMPT, max_new_tokens=5)
    assert result.tokens == plain_decode(ToyAdapter(), PROMPT, max_new_tokens=5)


@pytest.mark.parametrize("strategy", ["autoregressive", "lookahead"])
def test_more_memory_than_there_is(strategy: str) -> None:
    """A real allocation of terabytes; the decoder is as it was."""
    with torch.random.fork_rng():
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=2**42,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
    decoder = Decoder.from_model(model, strategy=strategy)
    before = decoder.generate(PROMPT, max_new_tokens=5)
    with pytest.raises(
        GenerationError, match=r"step 0: no memory for a cache of .* rows; lower max"
    ):
        decoder.generate(PROMPT, max_new_tokens=2**40)
    assert decoder.generate(PROMPT, max_new_tokens=5).tokens == before.tokens


@pytest.mark.parametrize("strategy", ["autoregressive", "jacobi", "prompt_lookup", "lookahead"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [1, 100, 126, 127])
def test_a_text_goes_on_to_the_very_last_position(strategy: str, kind: str, length: int) -> None:
    """GPT-2 has a table of 128 positions: a row beyond it would be an index error."""
    model = tiny_model(kind)
    prompt = random_prompt(length)
    decoder = Decoder.from_model(model, strategy=strategy, prefill_chunk=40)
    result = decoder.generate(prompt, max_new_tokens=500)
    assert result.finish_reason == "capacity"
    assert len(prompt) + len(result.tokens) == 128
    assert result.tokens == greedy_loop(model, prompt, 128 - length)


def test_weights_that_are_broken_are_an_error_with_the_step() -> None:
    model = copy.deepcopy(tiny_model())
    decoder = Decoder.from_model(model, strategy="jacobi")
    decoder.generate(PROMPT, max_new_tokens=3)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    for options in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.5}):
        with pytest.raises(GenerationError, match="step 0: the model returned NaN") as caught:
            decoder.generate(PROMPT, max_new_tokens=3, **options)
        assert caught.value.step == 0


def test_processors_that_leave_nothing_are_an_error_with_the_step() -> None:
    decoder = Decoder(ToyAdapter(), strategy=Autoregressive())
    with pytest.raises(GenerationError, match=r"step 2: the logits processors .* leave no token"):
        decoder.generate(
            PROMPT,
            max_new_tokens=9,
            logits_processor=lambda ids, scores: (
                scores - (torch.inf if ids.shape[1] >= len(PROMPT) + 2 else 0)
            ),
        )


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_a_model_in_the_middle_of_a_step_refuses_a_stranger(kind: str) -> None:
    """Another thread's call would get another mask than its attention was made for."""
    model = tiny_model(kind)
    ids = torch.tensor([random_prompt(6)])
    with attention_of(model), pytest.raises(BackendError, match="in the middle of a decodekit"):
        model(ids)
    model(ids)


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    expected = greedy_loop(tiny_model(), PROMPT, 12)
    decoder = Decoder.from_model(tiny_model())
    for temperature in (1e-30, 1e-46, 1e-300):
        result = decoder.generate(PROMPT, max_new_tokens=12, temperature=temperature)
        assert result.tokens == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 3.5}, "max_new_tokens must be a whole number, not 3.5"),
        ({"max_new_tokens": "3"}, "max_new_tokens must be a whole number, not '3'"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
        ({"top_k": True}, "top_k must be a whole number, not True"),
        ({"stop": ["a", 1]}, "stop must be strings"),
    ],
)
def test_options_of_a_wrong_type(options: dict[str, Any], message: str) -> None:
    decoder = Decoder(ToyAdapter(), strategy=Autoregressive())
    with pytest.raises(ConfigError, match=message):
        decoder.generate(PROMPT, **options)


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (None, "Liar must return a Proposal, not a NoneType"),
        (Proposal(TokenTree.chain([11])), r"Liar proposed 11, which is no token of 0 \.\. 10"),
        (Proposal(TokenTree.chain([-1])), "Liar proposed -1"),
        (Proposal(TokenTree.chain(["a"])), "Liar proposed 'a'"),  # type: ignore[list-item]
    ],
)
def test_a_proposer_that_returns_nonsense_is_named(proposal: Any, message: str) -> None:
    class Liar(Autoregressive):
        max_nodes = 4

        def propose(self, committed: Any, budget: Any) -> Any:
            return proposal

    decoder = Decoder(ToyAdapter(), strategy=Liar())
    with pytest.raises(TreeError, match=message):
        decoder.generate(PROMPT)


@pytest.mark.parametrize("strategy", [None, 3, {"window_size": 3}])
def test_what_is_no_strategy(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="strategy"):
        Decoder.from_model(tiny_model(), strategy=strategy)


@pytest.mark.skipif(not can_pack(torch.float32), reason="nothing can be packed here")
def test_a_model_is_packed_last_and_only_once() -> None:
    model = copy.deepcopy(tiny_model())
    with pytest.raises(ConfigError, match="unknown strategy"):
        Decoder.from_model(model, strategy="typo", execution="packed")
    with pytest.raises(ConfigError, match="unknown execution"):
        Decoder.from_model(model, execution="typo")
    assert type(model.lm_head) is nn.Linear
    for _ in range(2):
        Decoder.from_model(model, execution="auto")
        Decoder.from_model(model, execution="packed")
    assert type(model.lm_head) is PackedLinear


def test_a_stop_in_brackets_may_be_text() -> None:
    assert compose_config(["stop=[INST]"]).stop == ["[INST]"]
    assert compose_config(["stop=[/INST]"]).stop == ["[/INST]"]
    assert compose_config(["stop=["]).stop == ["["]
    assert compose_config(["stop=[a,b]"]).stop == ["a", "b"]
    assert compose_config(["stop=['a']"]).stop == ["a"]


def test_mistakes_of_newcomers(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match='a prompt is prompt="hello world"'):
        compose_config(["hello world"])
    monkeypatch.chdir(Path(checkpoint).parent)
    with pytest.raises(
        ConfigError, match=f"for the directory write model=./{Path(checkpoint).name}"
    ):
        compose_config([f"model={Path(checkpoint).name}"])
    assert compose_mapping({"model": Path(checkpoint)}).model.path == checkpoint
    with pytest.raises(ConfigError, match=r"Autoregressive; .*use Decoder\.from_model"):
        compose_mapping({"strategy": Autoregressive()})
    with pytest.raises(ConfigError, match="must be written as a mapping in a mapping"):
        compose_mapping({"strategy.window_size": 3})
    assert compose_config(["model.revision=1234e5"]).model.revision == "1234e5"


def test_where_the_model_should_run_is_checked_before_it_is_looked_for() -> None:
    for settings in ({"device": "gpu"}, {"dtype": "int8"}, {"execution": "pack"}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            Decoder.from_config(model="/nowhere", **settings)


class Interrupting:
    """Lets some calls of a method through and then raises what Ctrl-C raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int) -> None:
        method = getattr(owner, name)
        self.calls = 0

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls > after:
                raise KeyboardInterrupt
            return method(*arguments, **options)

        monkeypatch.setattr(owner, name, call)


def test_ctrl_c_in_the_comparison_keeps_the_answer(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Interrupting(monkeypatch, Decoder, "generate", after=1)  # the warm-up, then the baseline
    words = [f"model={checkpoint}", "prompt=a b", "max_new_tokens=5", "compare=true", "format=json"]
    assert main(words) == 130
    record = json.loads(capsys.readouterr().out)
    assert len(record["tokens"]) == 5
    assert "compare" not in record


def bench(checkpoint: str, tmp_path: Path, *lines: dict[str, Any], extra: Any = ()) -> int:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    output = tmp_path / "out.jsonl"
    return main(
        [
            "job=bench",
            f"model={checkpoint}",
            f"bench.prompts={prompts}",
            f"bench.output={output}",
            "max_new_tokens=4",
            "bench.strategies=[autoregressive]",
            "bench.baselines=[greedy]",
            *extra,
        ]
    )


def test_a_bench_that_cannot_start_leaves_the_old_output(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").write_text("precious", encoding="utf-8")
    long = {"id": "long", "input_ids": [5] * 128}
    assert bench(checkpoint, tmp_path, {"input_ids": [5]}, long) == 2
    assert (
        "prompt 'long': the prompt has 128 tokens and the model's context is 128"
        in capsys.readouterr().err
    )
    assert bench(checkpoint, tmp_path, {"id": "x", "input_ids": [99]}) == 2
    assert "prompt 'x': token id 99" in capsys.readouterr().err
    assert bench(checkpoint, tmp_path, {"input_ids": [5]}, extra=["max_new_tokens=0"]) == 2
    assert bench(checkpoint, tmp_path, {"input_ids": [5]}, extra=["bench.output=/nowhere/x"]) == 2
    assert "cannot write /nowhere/x: its directory does not exist" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == "precious"


def test_an_interrupted_bench_says_so_and_shows_what_there_is(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Interrupting(monkeypatch, Decoder, "generate", after=2)  # the warm-up and one prompt
    assert bench(checkpoint, tmp_path, {"input_ids": [5]}, {"input_ids": [6]}) == 130
    assert "all (1 prompts)" in capsys.readouterr().out
    assert len((tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_the_baselines_of_a_bench_are_plainly_greedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_checkpoint(tmp_path, kind="gemma2")  # this one repeats a single token
    file = tmp_path / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**settings, "repetition_penalty": 1.9}), encoding="utf-8")
    assert bench(directory, tmp_path, {"input_ids": [5, 6]}, extra=["backend=eager"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if "transformers greedy" in row]
    assert rows
    assert all("1/1" in row for row in rows)


def test_a_baseline_needs_a_model_of_transformers() -> None:
    with pytest.raises(ConfigError, match=r"a Linear does not have; set bench.baselines=\[\]"):
        baseline(torch.nn.Linear(1, 1), "greedy")  # type: ignore[arg-type]


def test_an_answer_is_not_lost_where_it_cannot_be_shown(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"model={checkpoint}", "prompt=a b", "max_new_tokens=3", "format=json"]
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(words) == 0
    assert len(json.loads(raw.getvalue())["tokens"]) == 3
    monkeypatch.setattr(sys, "stdout", None)
    assert main(words) == 0
    sys.stdout.close()


def test_a_prompt_that_is_no_text(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"model={checkpoint}", "prompt=\udcff"]) == 1
    assert "not valid Unicode text" in capsys.readouterr().err


def test_standard_input_that_is_closed(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main([f"model={checkpoint}", "prompt=-"]) == 1
    assert "the prompt is empty" in capsys.readouterr().err


def test_what_is_no_module_runs_as_it_is() -> None:
    assert prepare_execution(object(), "auto") == "eager"
    assert prepare_execution(torch.nn.Embedding(2, 2), "auto") == "eager"
    with pytest.raises(ConfigError, match="execution=packed needs a torch module"):
        prepare_execution(object(), "packed")
