"""What a step costs at least, against torch's own count of what it did and by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from decodekit.adapters.hf import HFAdapter
from decodekit.cli.profile.costs import ModelCosts, count_costs
from decodekit.cli.profile.limits import Rates, measure_rates
from decodekit.cli.profile.measure import tree_of
from decodekit.decoder.build import build_backend
from decodekit.interfaces.plan import StepPlan
from tests.support.tiny import own_model, tiny_model

COSTS = ModelCosts(
    weight_bytes=1000,
    matrix_weights=200,
    windows=(None, 4),
    heads=4,
    kv_heads=2,
    head_dim=8,
    element_bytes=2,
)


def test_a_step_by_hand() -> None:
    plan = StepPlan(10, (5,), tree_of(3, "chain", [6, 7]))
    # Keys and values: 2 * 2 heads * 8 * 2 bytes each, of 10 tokens and of the last 3.
    assert COSTS.bytes_of(plan) == 1000 + 64 * (10 + 3)
    # Rows at 10, 11, 12 see 11, 12, 13 keys in one layer and 4 each in the other.
    assert COSTS.operations_of(plan) == 2 * 200 * 3 + 4 * 4 * 8 * (11 + 12 + 13 + 3 * 4)


def test_a_row_of_a_tree_sees_its_path_only() -> None:
    plan = StepPlan(2, (5,), tree_of(6, "window", [1] * 5))
    assert plan.positions == (2, 3, 3, 4, 4, 5)
    seen = (3 + 4 + 4 + 5 + 5 + 6) + (3 + 4 + 4 + 4 + 4 + 4)
    assert COSTS.operations_of(plan) == 2 * 200 * 6 + 4 * 4 * 8 * seen


@pytest.mark.parametrize(
    "kind", ["llama", "llama-tied", "llama-wide-heads", "qwen3", "gemma", "phi", "gpt2", "cohere"]
)
def test_a_step_of_a_model_is_what_torch_counts(kind: str) -> None:
    model = tiny_model(kind)
    costs, reason = count_costs(model)
    assert costs is not None
    assert reason is None
    adapter = HFAdapter(model, build_backend("eager"))
    cache = adapter.new_cache(batch=1, capacity=30)
    adapter.forward([StepPlan(0, tuple(range(2, 22)))], cache)
    cache.commit([range(20)])
    plan = StepPlan(20, (3,))
    with FlopCounterMode(display=False) as counter:
        adapter.forward([plan], cache)
    assert costs.operations_of(plan) == counter.get_total_flops()
    held = sum(slab.numel() * slab.element_size() for slab in cache._storage.slabs) / 30
    assert costs.bytes_of(plan) - costs.weight_bytes == 20 * held


def test_an_embedding_is_read_where_the_head_shares_it() -> None:
    for kind in ("llama", "llama-tied"):
        model = tiny_model(kind)
        costs, _ = count_costs(model)
        embedding = model.get_input_embeddings().weight
        # Either way all but one table of the vocabulary.
        others = [one for one in model.parameters() if one.shape != embedding.shape]
        assert costs is not None
        assert costs.weight_bytes == 4 * (sum(map(torch.numel, others)) + embedding.numel())


def test_windows() -> None:
    for kind, windows in (
        ("mistral", (12,) * 4),
        ("mistral-full", (None,) * 4),
        ("gemma2", (12, None) * 2),
        ("qwen2-full", (None,) * 4),
    ):
        costs, _ = count_costs(tiny_model(kind))
        assert costs is not None
        assert costs.windows == windows


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mixtral", "which of its experts a step reads depends on the tokens"),
        ("deepseek_v3", "which of its experts a step reads depends on the tokens"),
        ("falcon", "its configuration does not say how its layers attend"),
    ],
)
def test_what_cannot_be_counted_is_not(kind: str, reason: str) -> None:
    assert count_costs(tiny_model(kind)) == (None, reason)


def test_a_model_of_another_kind_is_not_counted() -> None:
    assert count_costs(torch.nn.Linear(2, 2)) == (None, "the model is none of transformers")
    assert count_costs(object()) == (None, "the model is none of transformers")


def test_quantised_weights_are_not_counted() -> None:
    model = own_model()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.to(torch.int8), requires_grad=False)
    assert count_costs(model) == (None, "it has weights of Parameter, torch.int8")


def test_rates_are_those_of_the_fastest_kernel() -> None:
    first = Rates({"a": 1.0, "b": 5.0}, {"c": 7.0})
    assert (first.bytes_per_second, first.operations_per_second) == (5.0, 7.0)
    best = first.best(Rates({"a": 2.0, "b": 3.0}, {"c": 8.0}))
    assert best == Rates({"a": 2.0, "b": 5.0}, {"c": 8.0})


def test_a_machine_is_measured_and_no_random_state_is_touched() -> None:
    before = torch.random.get_rng_state()
    rates = measure_rates(0, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(rates.read) == {"sum", "matrix times vector"}
    assert {"matrix product"} <= set(rates.arithmetic) <= {"matrix product", "packed linear layer"}
    # Whatever the machine is.
    assert 1e7 < rates.bytes_per_second < 1e15
    assert 1e7 < rates.operations_per_second < 1e18
