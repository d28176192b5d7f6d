"""Running a benchmark: every contender on every prompt, in turns, in one process."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from decodekit.cli.bench.contenders import baseline, check_baseline, names_of, strategy
from decodekit.cli.bench.files import write_measurements
from decodekit.cli.bench.measurement import Measurement, measure
from decodekit.cli.bench.report import render
from decodekit.cli.machine import machine_facts
from decodekit.cli.output_files import check_writable
from decodekit.cli.prompt_files import encoded, read_prompts
from decodekit.cli.signals import exit_code
from decodekit.config.schema import BenchConfig, RunConfig
from decodekit.decoder.build import load
from decodekit.decoder.decoder import Decoder
from decodekit.errors import ConfigError, nearest, require_at_least

__all__ = ["run_bench"]


def run_bench(config: RunConfig) -> int:
    """Run ``job=bench``: the table to standard output, the measurements to ``bench.output``.

    Returns:
        The exit code: 1 if a strategy of ours gave other tokens than the reference contender.

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
    reference = _reference(bench)
    if bench.output is not None:
        check_writable(bench.output, key="bench.output")
    decoder = Decoder.from_config(config)
    contenders = [strategy(decoder, settings) for settings in bench.strategies]
    if bench.baselines:
        # A copy of its own: ours may have been changed for the way of execution.
        model, _ = load(config)
        honoured = config.model.generation_defaults
        contenders += [
            baseline(model, name, generation_defaults=honoured) for name in bench.baselines
        ]
    ready = [
        (prompt.id, prompt.category, encoded(prompt, decoder, key="bench.prompts"))
        for prompt in prompts
    ]
    measurements: list[Measurement] = []
    header = _header(config, decoder, reference)
    total = len(ready) * len(contenders) * bench.repeats
    interrupted = 0
    try:
        for measurement in measure(
            contenders,
            ready,
            reference=reference,
            max_new_tokens=config.max_new_tokens,
            repeats=bench.repeats,
        ):
            first = not measurements
            measurements.append(measurement)
            if bench.output is not None:
                # An earlier file is kept until there is something to put in its place.
                write_measurements(bench.output, [measurement], header=header if first else None)
            print(f"\r{len(measurements)} of {total}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt as interruption:
        interrupted = exit_code(interruption)
        print("\ninterrupted; what follows is what was measured until then", file=sys.stderr)
    finally:
        print(file=sys.stderr)
        # Interrupted in the midst of the first prompt there is nothing to compare with yet.
        if any(measurement.contender == reference for measurement in measurements):
            print(render(measurements, reference=reference))
    if interrupted:
        return interrupted
    ours = {contender.name for contender in contenders[: len(bench.strategies)]}
    return int(any(m.contender in ours and not m.equal for m in measurements))


def _reference(bench: BenchConfig) -> str:
    """Return the name of the contender that the others are compared with.

    Raises:
        ConfigError: There are no contenders, two have one name, or none has that of the reference.
    """
    names = names_of(bench.strategies, bench.baselines)
    if not names:
        raise ConfigError("nothing to compare; name bench.strategies", key="bench.strategies")
    if len(set(names)) < len(names):
        raise ConfigError(f"a contender is named twice: {names}", key="bench.strategies")
    if bench.reference is None:
        return names[0]
    if bench.reference not in names:
        raise ConfigError(
            f"the reference {bench.reference!r} is no contender: {nearest(bench.reference, names)}",
            key="bench.reference",
            value=bench.reference,
        )
    return bench.reference


def _header(config: RunConfig, decoder: Decoder, reference: str) -> dict[str, Any]:
    """Return what has to be known to judge the numbers: machine, versions, settings."""
    return {
        **machine_facts(),
        "dtype": str(getattr(getattr(decoder.adapter, "model", None), "dtype", config.dtype)),
        "adapter": decoder.adapter_name,  # where the settings say "auto"
        "execution": decoder.execution,
        "reference": reference,
        "generation_config": decoder.taken_from_model.values,
        "config": asdict(config),
    }
