"""``job=generate``: one prompt, the answer to standard output, a summary to standard error."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, NamedTuple

from decodekit.cli.inputs import read_prompt, request_options
from decodekit.cli.signals import exit_code
from decodekit.cli.verify.certificate import Verdict, compare, dtype_of
from decodekit.cli.verify.independent import Independent, compare_with_the_model
from decodekit.cli.verify.reference import reference_decoder, require_same_tokens, tie_tolerance
from decodekit.config.schema import RunConfig
from decodekit.decoder.decoder import Decoder
from decodekit.decoder.result import GenerationResult
from decodekit.decoder.stream import GenerationStream
from decodekit.errors import DecodekitError

__all__ = ["independent_record", "run_generate", "stats_record"]


_HALF = ("bfloat16", "float16")


def run_generate(config: RunConfig) -> int:
    """Decode one prompt as ``config`` says; return the exit code.

    Raises:
        ConfigError: There is no prompt, or two.
        DecodekitError: The model cannot be loaded or the request fails.
    """
    prompt = read_prompt(config)
    decoder = Decoder.from_config(config)
    if config.compare:
        require_same_tokens(decoder, config)
        reference = reference_decoder(decoder, config)
        # What torch prepares once in a process must not count for the one that runs first.
        decoder.generate(prompt, max_new_tokens=2)
    options = request_options(config)
    if config.n is not None:
        return _print_samples(config, decoder, decoder.generate(prompt, n=config.n, **options))
    stream = decoder.stream(prompt, **options)
    interrupted = _show(stream, quiet=config.format == "json")
    result = stream.result
    baseline: _Baseline | None = None
    failure: DecodekitError | None = None
    if config.compare and not interrupted:
        try:
            expected = reference.generate(prompt, **options)
            tolerance = tie_tolerance(decoder, config)
            verdict = compare(reference, prompt, expected, result, tolerance=tolerance, **options)
            own = compare_with_the_model(
                reference, prompt, expected, tolerance=tolerance, **options
            )
            baseline = _Baseline(expected, verdict, own)
        except KeyboardInterrupt as interruption:
            interrupted = exit_code(interruption)  # what there is already is still printed
        except DecodekitError as error:
            failure = error
    if config.format == "json":
        _print_json(_record(config, decoder, result, baseline))
    else:
        _summarize(config, decoder, result, baseline)
    if failure is not None:
        raise failure
    if interrupted:
        return interrupted
    return int(baseline is not None and baseline.has_defect)


def _print_samples(config: RunConfig, decoder: Decoder, results: list[GenerationResult]) -> int:
    """Print several answers to one prompt; return the exit code."""
    if config.format == "json":
        records = [
            {**_record(config, decoder, result, None), "seed": config.sampling.seed + i}
            for i, result in enumerate(results)
        ]
        _print_json(records)
        return 0
    for i, result in enumerate(results):
        print(f"[{i}] {result.text}", flush=True)
    for result in results:
        _summarize(config, decoder, result, None)
    return 0


def _print_json(value: Any) -> None:
    whole = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not whole, default=str), flush=True)


class _Baseline(NamedTuple):
    """The answer of autoregressive decoding, how the other one compares with it, and it itself."""

    result: GenerationResult
    verdict: Verdict
    independent: Independent

    @property
    def has_defect(self) -> bool:
        """Whether one of the two answers is not what it has to be."""
        return "defect" in (self.verdict.kind, getattr(self.independent.verdict, "kind", None))


def stats_record(result: GenerationResult) -> dict[str, Any]:
    """Return the stats of a result as plain numbers, the derived ones included."""
    stats = result.stats
    return {
        **asdict(stats),
        "tokens_per_step": stats.tokens_per_step,
        "rows_per_step": stats.rows_per_step,
        "tokens_per_second": stats.tokens_per_second,
    }


def _show(stream: GenerationStream, *, quiet: bool) -> int:
    """Print the text as it becomes certain; return the exit code if it was interrupted, else 0."""
    interrupted = 0
    try:
        for chunk in stream:
            if not quiet and chunk.text:
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt as interruption:
        stream.close()
        interrupted = exit_code(interruption)
    if not quiet:
        print(flush=True)
    return interrupted


def _record(
    config: RunConfig, decoder: Decoder, result: GenerationResult, baseline: _Baseline | None
) -> dict[str, Any]:
    """Return the JSON object of ``format=json``."""
    record: dict[str, Any] = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "prompt_tokens": len(result.prompt_tokens),
        "stats": stats_record(result),
        "model": config.model.name,
        "adapter": decoder.adapter_name,
        "execution": decoder.execution,
        "invariance_obstacle": decoder.invariance_obstacle,
        "strategy": asdict(config.strategy),
        "seed": config.sampling.seed,
        "generation_config": decoder.taken_from_model.values,
    }
    if decoder.compilation is not None:
        record["compilation"] = asdict(decoder.compilation)
    if result.logprobs is not None:
        record["logprobs"] = [asdict(one) for one in result.logprobs]
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = [one and asdict(one) for one in result.prompt_logprobs]
    if baseline is not None:
        record["compare"] = {
            "autoregressive": stats_record(baseline.result),
            "equal": baseline.verdict.kind == "equal",
            "verdict": asdict(baseline.verdict),
            "independent": independent_record(baseline.independent),
            "speedup": _speedup(result, baseline.result),
        }
    return record


def _summarize(
    config: RunConfig, decoder: Decoder, result: GenerationResult, baseline: _Baseline | None
) -> None:
    name = config.strategy.name
    end = f" ({result.finish_reason}), adapter {decoder.adapter_name}, {_execution(decoder)}"
    lines = ["", _line(name, result) + end]
    if taken := str(decoder.taken_from_model):
        lines.append(taken)
    if baseline is not None:
        lines.append(_line("autoregressive", baseline.result))
        speedup = _speedup(result, baseline.result)
        lines.append(f"{name} is {speedup:.2f} times as fast, {_sameness(baseline.verdict)}")
        lines.append(_of_the_model(baseline.independent))
    print("\n".join(lines), file=sys.stderr)


def _execution(decoder: Decoder) -> str:
    """Return the way of execution in words, with what compiling has cost.

    In half precision, where ties are common, it says why they may fall another way here.
    """
    words, cost = f"execution {decoder.execution}", decoder.compilation
    if cost is not None and cost.count:
        words += f" (compiled {cost.count} times, {cost.seconds:.1f} s)"
    obstacle = decoder.invariance_obstacle if dtype_of(decoder) in _HALF else None
    return words if obstacle is None else f"{words}, ties may fall another way: {obstacle}"


def independent_record(independent: Independent) -> dict[str, Any]:
    """Return as plain data what the model's own forward pass says."""
    verdict = independent.verdict
    return {"reason": independent.reason} if verdict is None else asdict(verdict)


def _of_the_model(independent: Independent) -> str:
    """Return in words what the model's own forward pass says of autoregressive decoding."""
    if independent.verdict is None:
        return f"no independent reference: {independent.reason}"
    sameness = _sameness(independent.verdict)
    return f"autoregressive against the model's own forward pass: {sameness}"


def _sameness(verdict: Verdict) -> str:
    """Return in words how the tokens compare with those of autoregressive decoding."""
    if verdict.kind == "equal":
        return "equal tokens"
    if verdict.kind == "defect":
        return f"DIFFERENT from token {verdict.divergences[-1].position} on"
    ties = ", ".join(f"{one.position} (gap {one.gap:.2g})" for one in verdict.divergences)
    return f"equal but for numerical ties at token {ties}"


def _line(name: str, result: GenerationResult) -> str:
    stats = result.stats
    return (
        f"{name}: {stats.tokens} tokens in {stats.steps} steps, "
        f"{stats.tokens_per_step:.2f} tokens/step, {stats.rows_per_step:.1f} rows/step, "
        f"{stats.tokens_per_second:.1f} tokens/s, first token after "
        f"{stats.time_to_first_token:.2f} s"
    )


def _speedup(result: GenerationResult, baseline: GenerationResult) -> float:
    return baseline.stats.seconds / result.stats.seconds if result.stats.seconds else 1.0
