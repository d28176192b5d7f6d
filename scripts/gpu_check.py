"""Is everything right, and how fast is it, on this card? No network, some minutes for compilers.

    python scripts/gpu_check.py [--output results.json] [--size tiny|1b] [--tokens 64]

Four parts: every attention backend against ``eager`` on random trees in half precision; every
strategy against autoregressive decoding on a LLaMA with random weights; the time of a step by its
number of rows; tokens per second of every strategy and backend and of transformers' ``generate``,
with the peak of memory. What this machine cannot do is skipped, with the reason. Without a GPU the
model is tiny and the figures say nothing, but the same code runs.

The exit code is 1 if a backend or a strategy is wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decodekit import Decoder
from decodekit.cli.bench.contenders import baseline
from decodekit.cli.table import render_table
from decodekit.cli.verify.certificate import TOLERANCES, compare
from decodekit.config.plugins.installed import registry
from decodekit.decoder.build import build_adapter, build_backend
from decodekit.engine.runner import LocalRunner
from decodekit.errors import DecodekitError
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import ROOT, TokenTree

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "1b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}
ROWS = (1, 8, 32, 64, 128, 256)
STRATEGIES: list[Any] = [
    "autoregressive",
    "jacobi",
    "prompt_lookup",
    "lookahead",
    {"name": "lookahead", "window_size": 15, "ngram_size": 5, "max_candidates": 15},
]
COMPILED = ("flex", "triton")
Case = tuple[list[tuple[int, int]], tuple[int, int], int, int | None, str]
CASES: list[Case] = [
    # prefix and nodes of each sequence, query and kv heads, head dim, window, what else
    ([(0, 7)], (8, 2), 64, None, ""),
    ([(1, 1)], (4, 4), 128, None, ""),
    ([(37, 20)], (7, 1), 80, None, ""),
    ([(300, 64)], (9, 3), 96, 50, ""),
    ([(1000, 120)], (8, 2), 256, None, ""),
    ([(9000, 10)], (32, 8), 128, None, ""),
    ([(9000, 0), (0, 40), (300, 5)], (8, 2), 64, 400, ""),
    ([(300, 30)], (8, 2), 64, None, "softcap"),
    ([(300, 30)], (8, 2), 64, 20, "sinks"),
]
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of attention outputs


def main() -> int:
    """Run all parts and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--output", type=Path, help="a file for the results, as JSON")
    parser.add_argument("--size", choices=SIZES, default="1b" if cuda else "tiny")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of an answer")
    arguments = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    results: dict[str, Any] = {"header": header(arguments.size, device)}
    started = time.perf_counter()

    results["backends"] = list(check_backends(device))
    show("Backends against eager", results["backends"])
    right = {row["backend"] for row in results["backends"] if row["verdict"].startswith("equal")}
    usable = ["eager", *sorted(right)]
    dtype = torch.bfloat16 if cuda else torch.float32
    model = random_llama(arguments.size, device, dtype)
    results["lossless"] = list(check_strategies(model, usable, arguments.tokens))
    show("Strategies against autoregressive", results["lossless"])
    results["step_ms"] = list(step_times(model, usable))
    show("Milliseconds of a step by its rows", results["step_ms"])
    results["speed"] = list(speeds(model, usable, arguments.tokens))
    show("Tokens per second", results["speed"])

    results["seconds"] = round(time.perf_counter() - started, 1)
    print(f"\n{results['seconds']} s in all")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    rows = [*results["backends"], *results["lossless"]]
    return int(any(row["verdict"].startswith(("WRONG", "defect")) for row in rows))


def header(size: str, device: torch.device) -> dict[str, Any]:
    """Return what has to be known to judge the figures."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("decodekit", "torch", "transformers")},
        "model": {"size": size, **SIZES[size]},
    }


def random_llama(size: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a LLaMA with random weights, the same ones each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=4096, eos_token_id=None, pad_token_id=0
    )
    with torch.device(device):
        model: PreTrainedModel = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def prompt_of(model: PreTrainedModel, length: int = 100) -> list[int]:
    """Return a prompt of random tokens that repeats itself."""
    generator = random.Random(1)
    half = [generator.randrange(2, model.config.vocab_size) for _ in range(length // 2)]
    return half + half


def random_tree(nodes: int, generator: random.Random) -> TokenTree:
    """Return a tree of so many nodes, deep and wide."""
    parents = tuple(generator.randrange(ROOT, node) for node in range(nodes))
    return TokenTree(tuple(generator.randrange(2, 500) for _ in range(nodes)), parents)


def check_backends(device: torch.device) -> Iterator[dict[str, Any]]:
    """Compare every backend with ``eager`` on the steps of ``CASES``."""
    for name in registry().names("backend"):
        if name == "eager":
            continue
        if name in COMPILED and device.type != "cuda":
            note = "its kernels are compiled, which is worth it on a GPU only"
            yield {"backend": name, "dtype": "-", "difference": None, "verdict": f"skipped: {note}"}
            continue
        for dtype in (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,):
            apart, verdict = judged(name, dtype, device)
            label = str(dtype).removeprefix("torch.")
            yield {"backend": name, "dtype": label, "difference": apart, "verdict": verdict}


def judged(name: str, dtype: torch.dtype, device: torch.device) -> tuple[float | None, str]:
    """Return the largest difference of a backend to ``eager``, and a verdict."""
    apart, refusals = 0.0, []
    cases = CASES[:3] if dtype == torch.float16 else CASES  # each is compiled anew
    for case in cases:
        try:
            apart = max(apart, difference(build_backend(name), case, dtype, device))
        except (DecodekitError, ImportError) as error:
            refusals.append(str(error))
        except Exception as error:  # of a kernel's compiler; the other backends are still checked
            return None, f"WRONG: {case} raised {error!r}"[:300]
    if len(refusals) == len(cases):
        return None, f"skipped: {refusals[0]}"
    return apart, "; ".join(["equal" if apart <= CLOSE[dtype] else "WRONG", *refusals])


def difference(backend: Any, case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference to ``eager`` of a step; infinity where that is no number."""
    steps, (heads, kv_heads), dim, window, asked = case
    generator = random.Random(0)
    torch.manual_seed(0)
    masks = [StepPlan(p, (3,), random_tree(nodes, generator)).mask() for p, nodes in steps]
    rows = max(mask.rows for mask in masks)
    keys = max(mask.prefix + mask.rows for mask in masks)
    query = torch.randn(len(masks), heads, rows, dim, device=device).to(dtype)
    key, value = torch.randn(2, len(masks), kv_heads, keys, dim, device=device).to(dtype)
    options: dict[str, Any] = {"scale": dim**-0.5}
    if asked:
        sinks = torch.linspace(-2, 3, heads, device=device).to(dtype)
        options[asked] = {"softcap": 5.0, "sinks": sinks}[asked]
    outputs = []
    for kernel in (backend, build_backend("eager")):
        lowered = kernel.lower(masks, window=window, dtype=dtype, device=device)
        outputs.append(kernel.attend(query, key, value, lowered, **options).float())
    apart = (outputs[0] - outputs[1]).abs().nan_to_num(nan=float("inf"))
    return max(float(apart[i, : mask.rows].max()) for i, mask in enumerate(masks))


def check_strategies(
    model: PreTrainedModel, backends: list[str], tokens: int
) -> Iterator[dict[str, Any]]:
    """Judge the answers of every strategy and backend, with those of the same backend alone."""
    prompt = prompt_of(model)
    tolerance = TOLERANCES[str(model.dtype).removeprefix("torch.")]
    for backend in backends:
        plain = Decoder.from_model(model, strategy="autoregressive", backend=backend)
        for options in ({}, {"temperature": 1.0, "top_p": 0.95, "seed": 5}):
            asked: dict[str, Any] = {"max_new_tokens": tokens, **options}
            expected = plain.generate(prompt, **asked)
            for strategy in STRATEGIES[1:]:
                got = plain.with_strategy(strategy).generate(prompt, **asked)
                verdict = compare(plain, prompt, expected, got, tolerance=tolerance, **asked)
                yield {
                    "backend": backend,
                    "strategy": label(strategy),
                    "sampled": bool(options),
                    "tokens_per_step": round(got.stats.tokens_per_step, 2),
                    "verdict": verdict.kind,
                }


def step_times(model: PreTrainedModel, backends: list[str]) -> Iterator[dict[str, Any]]:
    """Time steps of 1 to 256 rows behind a prompt, per backend."""
    prompt = tuple(prompt_of(model, 512))
    for backend in backends:
        runner = LocalRunner(build_adapter(model, adapter="hf", backend=backend))
        runner.start(capacity=len(prompt) + max(ROWS))
        runner.run([StepPlan(0, prompt)])
        runner.cache.commit([range(len(prompt))])
        row: dict[str, Any] = {"backend": backend}
        for rows in ROWS:
            tree = random_tree(rows - 1, random.Random(rows))
            plan = StepPlan(len(prompt), (7,), tree)
            row[str(rows)] = round(
                1000 * seconds_of(lambda run=runner.run, plan=plan: run([plan])), 3
            )
        yield row


def seconds_of(run: Callable[[], Any], repeats: int = 12) -> float:
    """Return the median time of a call, the first few left out."""
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return median(times[3:])


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speeds(model: PreTrainedModel, backends: list[str], tokens: int) -> Iterator[dict[str, Any]]:
    """Measure tokens per second and the peak of memory, transformers' own generate included."""
    prompt = prompt_of(model)
    for name in ("greedy", "prompt_lookup"):
        theirs = baseline(model, name)
        yield measured({"who": theirs.name}, lambda run=theirs.run: len(run(prompt, tokens).tokens))
    for backend in backends:
        for strategy in STRATEGIES:
            decoder = Decoder.from_model(model, strategy=strategy, backend=backend)
            yield measured(
                {"who": f"{label(strategy)}, {backend}"},
                lambda ours=decoder: len(ours.generate(prompt, max_new_tokens=tokens).tokens),
            )


def measured(row: dict[str, Any], run: Callable[[], int]) -> dict[str, Any]:
    """Return ``row`` with the speed of a run, the better of two after a warm-up."""
    run()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    best = 0.0
    for _ in range(2):
        synchronize()
        start = time.perf_counter()
        count = run()
        synchronize()
        best = max(best, count / (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {**row, "tokens_per_second": round(best, 1), "peak_gib": peak and round(peak, 2)}


def label(strategy: Any) -> str:
    """Return a strategy's name with its settings."""
    if isinstance(strategy, str):
        return strategy
    values = ",".join(str(value) for key, value in strategy.items() if key != "name")
    return f"{strategy['name']}({values})"


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a part as a table."""
    print(f"\n{title}\n")
    cells = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    print(render_table([list(rows[0]), *cells]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
