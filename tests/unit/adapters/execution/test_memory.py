"""What memory packing takes at its height, and what a step allocates as the context grows."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from decodekit.adapters.execution.packed import PackedLinear, can_pack, pack_linears
from decodekit.adapters.execution.release import release_mapped, trim_heap
from decodekit.adapters.llama import LlamaAdapter
from decodekit.backends.sdpa import SDPABackend
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree

needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this build of torch cannot pack linear layers"
)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of memory")


def config(**changes: Any) -> LlamaConfig:
    settings = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**settings, **changes})


# --- packing -------------------------------------------------------------------------------------

PACK = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from decodekit.decoder.build import build_adapter, prepare_execution
from decodekit.interfaces.plan import StepPlan

def measured(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

path, adapter = sys.argv[1:]
tiny = build_adapter(AutoModelForCausalLM.from_pretrained(path + "/tiny").eval(), adapter=adapter)
prepare_execution(tiny.model, "packed")  # what is imported and prepared once
before = measured("VmRSS:")
model = AutoModelForCausalLM.from_pretrained(path + "/large", dtype="auto").eval()
model.requires_grad_(False)
weights = sum(weight.nbytes for weight in model.parameters())
built = build_adapter(model, adapter=adapter)
prepare_execution(model, "packed", built)
cache = built.new_cache(batch=1, capacity=8)
built.forward([StepPlan(0, (1, 2, 3))], cache)
result = [weights, measured("VmRSS:") - before, measured("VmHWM:") - before]
print(json.dumps(result))
"""


@needs_packing
@on_linux
@pytest.mark.parametrize("adapter", ["llama", "hf"])
def test_packing_takes_little_more_than_the_weights(tmp_path: Path, adapter: str) -> None:
    """Tied embedding and head included, which are held twice; mapped pages of the file counted."""
    large = config(
        vocab_size=30_000,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=5,
    )
    for name, made in (("tiny", config()), ("large", large)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(made).to(torch.float32).save_pretrained(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", PACK, str(tmp_path), adapter],
        capture_output=True,
        text=True,
        check=True,
    )
    weights, after, peak = json.loads(done.stdout.splitlines()[-1])
    assert weights > 250 * 2**20
    assert after <= peak < 1.35 * weights


@needs_packing
def test_at_most_one_group_is_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every earlier layer's weights are gone when the next is packed."""
    gc.freeze()  # hides the objects of earlier tests from `_living`
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config(num_hidden_layers=4, tie_word_embeddings=False))
    alive: list[int] = []
    real = PackedLinear.__init__

    def watched(self: PackedLinear, linear: nn.Linear) -> None:
        alive.append(sum(type(module) is nn.Linear for module in model.modules()))
        weights = {id(m) for m in _living(nn.Linear) if m.weight.shape != (1, 1)} & known
        assert len(weights) <= alive[-1] + 1, "one that was packed before is still there"
        real(self, linear)

    known = {id(module) for module in model.modules() if type(module) is nn.Linear}
    monkeypatch.setattr(PackedLinear, "__init__", watched)
    try:
        pack_linears(model)
    finally:
        gc.unfreeze()
    assert alive == sorted(alive, reverse=True)
    assert len(alive) == 29


def _living(kind: type) -> list[Any]:
    return [thing for thing in gc.get_objects() if type(thing) is kind]


@needs_packing
def test_a_tied_head_that_is_most_of_the_model_is_not_held_twice() -> None:
    for vocab_size, packed in ((64, True), (4000, False)):
        with torch.random.fork_rng():
            model = LlamaForCausalLM(config(vocab_size=vocab_size)).eval()
        tokens = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            expected = model(tokens).logits
            pack_linears(model)
            torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
        assert isinstance(model.lm_head, PackedLinear) == packed
        assert isinstance(model.model.layers[1].mlp.up_proj, PackedLinear)


@on_linux
def test_pages_of_a_file_leave_memory_and_keep_their_values(tmp_path: Path) -> None:
    numbers = torch.arange(3_000_000, dtype=torch.float32)
    file = tmp_path / "numbers"
    numbers.numpy().tofile(file)

    def mapped() -> Tensor:
        return torch.from_file(str(file), shared=False, size=numbers.numel())

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))

    tensor = mapped()
    assert float(tensor.sum()) > 0
    before = resident()
    assert release_mapped(tensor)
    assert before - resident() > 0.9 * tensor.nbytes
    assert torch.equal(tensor, numbers)
    written = mapped()
    written[2_000_000] = -1.0  # the file does not have this
    assert not release_mapped(written)
    assert written[2_000_000] == -1.0
    assert release_mapped(written[:1_000_000])
    assert not release_mapped(numbers)
    assert not release_mapped(tensor[:5])
    assert not release_mapped(tensor[::2])
    trim_heap()
    assert torch.equal(tensor, numbers)


# --- a step --------------------------------------------------------------------------------------


def allocated(adapter: LlamaAdapter, *, prefix: int, tree: TokenTree) -> int:
    """Return the bytes that are allocated in a step behind ``prefix`` committed tokens."""
    cache = adapter.new_cache(batch=1, capacity=3010)
    while cache.lengths[0] < prefix:
        rows = min(500, prefix - cache.lengths[0])
        adapter.forward([StepPlan(cache.lengths[0], (3,) * rows)], cache)
        cache.commit([range(rows)])
    plan = [StepPlan(prefix, (5,), tree)]
    adapter.forward(plan, cache)  # tables that grow by doubling have grown
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        adapter.forward(plan, cache)
    return sum(max(0, event.self_cpu_memory_usage) for event in seen.events())


@pytest.mark.parametrize("execution", ["eager", "packed"])
def test_a_step_allocates_nothing_that_grows_with_the_context_but_its_mask(
    execution: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config(num_hidden_layers=3)).eval()
    adapter = LlamaAdapter(model, SDPABackend())
    if execution == "packed" and can_pack(torch.float32):
        pack_linears(model)
    short, long = 700, 2900
    for tree in (TokenTree(), TokenTree((1, 2, 3, 4), (ROOT, 0, 0, 1))):
        rows = 1 + len(tree)
        grown = allocated(adapter, prefix=long, tree=tree) - allocated(
            adapter, prefix=short, tree=tree
        )
        # One row needs no mask. More: per row and key a bool and its complement, and a float, once
        # more for each query head of a group.
        groups = model.config.num_attention_heads // model.config.num_key_value_heads
        per_key = 0 if rows == 1 else rows * (1 + 1 + 4 + 4 * groups)
        assert grown == per_key * (long - short)
    capfd.readouterr()  # the profiler's own lines
