"""Running a benchmark: every contender on every prompt, in turns, in one process."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from decodekit.bench.contenders import baseline, strategy
from decodekit.bench.measurement import Measurement, measure
from decodekit.bench.prompts import read_prompts
from decodekit.bench.report import render
from decodekit.config import RunConfig
from decodekit.decoder import Decoder
from decodekit.errors import ConfigError
from decodekit.factory import load
from decodekit.prompts import encode_prompt

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
    if config.sampling.temperature > 0:
        raise ConfigError("a benchmark is greedy; use sampling=greedy", key="sampling")
    prompts = read_prompts(bench.prompts, limit=bench.limit)
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
    encoded = [
        (
            prompt.id,
            prompt.category,
            encode_prompt(
                prompt.prompt,
                decoder.tokenizer,
                chat=prompt.chat and bool(decoder.chat),
                vocab_size=decoder.adapter.vocab_size,
            ),
        )
        for prompt in prompts
    ]
    measurements: list[Measurement] = []
    output = _open(bench.output)
    try:
        _write(output, {"header": _header(config, decoder)})
        for measurement in measure(
            contenders, encoded, max_new_tokens=config.max_new_tokens, repeats=bench.repeats
        ):
            measurements.append(measurement)
            _write(output, asdict(measurement))
            print(
                f"\r{len(measurements)} of {len(encoded) * len(contenders) * bench.repeats}",
                end="",
                file=sys.stderr,
                flush=True,
            )
    except KeyboardInterrupt:
        print("\ninterrupted; what follows is what was measured until then", file=sys.stderr)
    finally:
        print(file=sys.stderr)
        if output is not None:
            output.close()
    print(render(measurements))
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


def _open(path: str | None) -> IO[str] | None:
    if path is None:
        return None
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", key="bench.output") from error


def _write(output: IO[str] | None, record: dict[str, Any]) -> None:
    if output is not None:
        output.write(json.dumps(record, ensure_ascii=False) + "\n")
        output.flush()
