"""Running ``job=profile``: the curve T(rows) of a model on this machine, and what limits it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from decodekit.cli.machine import machine_facts
from decodekit.cli.output_files import check_writable
from decodekit.cli.profile.chart import draw
from decodekit.cli.profile.costs import ModelCosts, count_costs
from decodekit.cli.profile.limits import Rates, measure_rates
from decodekit.cli.profile.measure import StepTimer
from decodekit.cli.profile.record import FORMAT, VERSION, point_record, write_record
from decodekit.cli.profile.report import render
from decodekit.cli.signals import exit_code
from decodekit.config.schema import RunConfig
from decodekit.decoder.build import build_adapter, load, prepare_execution
from decodekit.errors import ConfigError
from decodekit.interfaces.adapter import ModelAdapter

__all__ = ["run_profile"]


def run_profile(config: RunConfig) -> int:
    """Run ``job=profile``: a table and bars to standard output, the curve to ``profile.output``.

    Whatever ends it, what was measured until then is shown and stored. A file that is there already
    is kept until there is something to put in its place.

    Returns:
        The exit code: 0, or that of an interruption.

    Raises:
        ConfigError: The output cannot be written, or a step has no room in the model's context.
        DecodekitError: The model cannot be loaded or run.
    """
    settings = config.profile
    drawing = None if settings.output is None else _drawing(settings.output)
    for path in (settings.output, drawing):
        if path is not None:
            check_writable(path, key="profile.output")
    model, _ = load(config)
    adapter = build_adapter(
        model,
        adapter=config.adapter,
        backend=config.backend,
        max_positions=config.model.max_positions,
    )
    costs, uncounted = count_costs(model)  # packed layers cannot be counted any more
    execution = prepare_execution(model, config.execution, adapter)
    timer = StepTimer(
        adapter,
        rows=settings.rows,
        contexts=settings.contexts,
        shape=settings.tree,
        prefill_chunk=config.prefill_chunk,
    )
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "complete": False,
        "machine": machine_facts(),
        "model": _model_facts(config, model, adapter, execution),
        "settings": asdict(config),
    }
    samples: dict[tuple[int, int], list[float]] = {point: [] for point in timer.points}
    rates: Rates | None = None
    code = 0
    try:
        timer.prepare()
        rates = _rates(model, costs, timer)
        total = len(timer.points) * settings.repeats
        for number, (context, rows, seconds) in enumerate(timer.repeats(settings.repeats), 1):
            samples[context, rows].append(seconds)
            print(f"\r{number} of {total}", end="", file=sys.stderr, flush=True)
        facts["complete"] = True
        # Once more at the end: a machine that was busy at first must not lower the limit.
        rates = rates.best(_rates(model, costs, timer))
    except KeyboardInterrupt as interruption:
        code = exit_code(interruption)
        print("\ninterrupted; what follows is what was measured until then", file=sys.stderr)
    finally:
        print(file=sys.stderr)
        record = {
            **facts,
            "rates": None if rates is None else asdict(rates),
            "uncounted": uncounted,
            "points": _points(timer, samples, costs, rates),
        }
        print(render(record))
        if record["points"] and settings.output is not None and drawing is not None:
            write_record(settings.output, record)
            Path(drawing).write_text(draw(record), encoding="utf-8")
    return code


def _drawing(output: str) -> str:
    """Return the file of the drawing beside ``output``."""
    try:
        drawing = str(Path(output).with_suffix(".svg"))
    except ValueError:  # no name at all; the check that follows says so
        return output
    if drawing == output:
        raise ConfigError(
            f"profile.output is the JSON file, and the drawing is put beside it; write "
            f"profile.output={Path(output).with_suffix('.json')}",
            key="profile.output",
            value=output,
        )
    return drawing


def _placement(model: Any) -> tuple[torch.dtype, torch.device]:
    """Return dtype and device of a model; those of plain torch where it does not say."""
    dtype = getattr(model, "dtype", None)
    device = getattr(model, "device", None)
    return (
        dtype if isinstance(dtype, torch.dtype) else torch.float32,
        device if isinstance(device, torch.device) else torch.device("cpu"),
    )


def _rates(model: Any, costs: ModelCosts | None, timer: StepTimer) -> Rates:
    dtype, device = _placement(model)
    size = 0 if costs is None else costs.bytes_of(timer.plan(*timer.points[-1]))
    return measure_rates(size, dtype=dtype, device=device)


def _model_facts(
    config: RunConfig, model: Any, adapter: ModelAdapter, execution: str
) -> dict[str, str]:
    """Return what was picked where the settings say ``auto``."""
    dtype, device = _placement(model)
    return {
        "name": config.model.path or config.model.name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "adapter": str(getattr(adapter, "name", type(adapter).__name__)),
        "backend": str(getattr(config.backend, "name", config.backend)),
        "execution": execution,
    }


def _points(
    timer: StepTimer,
    samples: Mapping[tuple[int, int], Sequence[float]],
    costs: ModelCosts | None,
    rates: Rates | None,
) -> list[dict[str, Any]]:
    fewest = min(rows for _, rows in samples)
    return [
        point_record(
            context,
            rows,
            own,
            base=samples[context, fewest],
            limit=_limit(timer, context, rows, costs, rates),
        )
        for (context, rows), own in samples.items()
        if own
    ]


def _limit(
    timer: StepTimer, context: int, rows: int, costs: ModelCosts | None, rates: Rates | None
) -> dict[str, float] | None:
    if costs is None or rates is None:
        return None
    plan = timer.plan(context, rows)
    read, operations = costs.bytes_of(plan), costs.operations_of(plan)
    return {
        "bytes": read,
        "operations": operations,
        "read_seconds": read / rates.bytes_per_second,
        "arithmetic_seconds": operations / rates.operations_per_second,
    }
