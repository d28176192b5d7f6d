"""Running a benchmark: every contender on every prompt, in turns, in one process."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from decodekit.bench.contenders import baseline, check_baseline, strategy
from decodekit.bench.measurement import Measurement, measure
from decodekit.bench.report import render
from decodekit.config import RunConfig
from decodekit.decoder import Decoder
from decodekit.errors import ConfigError, require_at_least
from decodekit.factory import load
from decodekit.prompt_files import encoded, read_prompts
from decodekit.signals import exit_code

__all__ = ["run_bench"]


def run_bench(config: RunConfig) -> int:
    """Run ``job=bench``: the table to standard output, the measurements to ``bench.output``.

    Returns:
        The exit code: 1 if a strategy of ours gave other tokens than the first contender.

    Raises:
        ConfigError: No prompts or no contenders are given, or one is unknown.
    """
    bench = config.bench
    if bench.prompts is None:
        raise ConfigError("give prompts: bench.prompts=FILE.jsonl", key="bench.prompts")
    if config.sampling.temperature > 0 or config.sampling.changes_logits:
        raise ConfigError("a benchmark is plain greedy; use sampling=greedy", key="sampling")
    require_at_least(config.max_new_tokens, 1, key="max_new_tokens")
    prompts = read_prompts(bench.prompts, limit=bench.limit, key="bench.prompts")
    for name in bench.baselines:
        check_baseline(name)
    if bench.output is not None:
        _check_writable(bench.output)
    decoder = Decoder.from_config(config)
    contenders = [strategy(decoder, settings) for settings in bench.strategies]
    if bench.baselines:
        # A copy of its own: ours may have been changed for the way of execution.
        model, _ = load(config)
        contenders += [baseline(model, name) for name in bench.baselines]
    if not contenders:
        raise ConfigError("nothing to compare; name bench.strategies", key="bench.strategies")
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise ConfigError(f"a contender is named twice: {names}", key="bench.strategies")
    ready = [
        (prompt.id, prompt.category, encoded(prompt, decoder, key="bench.prompts"))
        for prompt in prompts
    ]
    measurements: list[Measurement] = []
    header = {"header": _header(config, decoder)}
    total = len(ready) * len(contenders) * bench.repeats
    interrupted = 0
    try:
        for measurement in measure(
            contenders, ready, max_new_tokens=config.max_new_tokens, repeats=bench.repeats
        ):
            first = not measurements
            measurements.append(measurement)
            if bench.output is not None:
                # An earlier file is kept until there is something to put in its place.
                record = asdict(measurement)
                _write(bench.output, [header, record] if first else [record], first=first)
            print(f"\r{len(measurements)} of {total}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt as interruption:
        interrupted = exit_code(interruption)
        print("\ninterrupted; what follows is what was measured until then", file=sys.stderr)
    finally:
        print(file=sys.stderr)
        print(render(measurements))
    if interrupted:
        return interrupted
    ours = {contender.name for contender in contenders[: len(bench.strategies)]}
    return int(any(m.contender in ours and not m.equal for m in measurements))


def _header(config: RunConfig, decoder: Decoder) -> dict[str, Any]:
    """Return what has to be known to judge the numbers: machine, versions, settings."""
    return {
        "machine": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("decodekit", "torch", "transformers")},
        "dtype": str(getattr(getattr(decoder.adapter, "model", None), "dtype", config.dtype)),
        "adapter": decoder.adapter_name,  # where the settings say "auto"
        "config": asdict(config),
    }


def _processor() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _check_writable(path: str) -> None:
    file = Path(path)
    reason = None
    if file.is_dir():
        reason = "it is a directory"
    elif not file.parent.is_dir():
        reason = "its directory does not exist"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "permission denied"
    if reason is not None:
        raise ConfigError(f"cannot write {path}: {reason}", key="bench.output")


def _write(path: str, records: list[dict[str, Any]], *, first: bool) -> None:
    with Path(path).open("w" if first else "a", encoding="utf-8") as output:
        output.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
