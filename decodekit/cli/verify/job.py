"""``job=verify``: run prompts under autoregressive decoding and under the given setting."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decodekit.cli.generate import independent_record
from decodekit.cli.inputs import read_prompt, request_options
from decodekit.cli.prompt_files import FilePrompt, encoded, read_prompts
from decodekit.cli.signals import exit_code
from decodekit.cli.table import render_table
from decodekit.cli.verify.certificate import Verdict, compare, dtype_of
from decodekit.cli.verify.independent import Independent, compare_with_the_model
from decodekit.cli.verify.reference import reference_decoder, require_same_tokens, tie_tolerance
from decodekit.config.schema import RunConfig
from decodekit.decoder.decoder import Decoder
from decodekit.errors import ConfigError, GenerationError, require_at_least

__all__ = ["run_verify"]


@dataclass(frozen=True, slots=True)
class _Judged:
    prompt: FilePrompt
    verdict: Verdict
    independent: Independent

    @property
    def kinds(self) -> tuple[str | None, str | None]:
        """What both verdicts say; None for one that could not be had."""
        return self.verdict.kind, getattr(self.independent.verdict, "kind", None)


def run_verify(config: RunConfig) -> int:
    """Run ``job=verify``: a report to standard output, progress to standard error.

    Returns:
        The exit code: 0 if there is no defect.

    Raises:
        ConfigError: There are no prompts, or the setting need not give the same tokens.
    """
    require_at_least(config.max_new_tokens, 1, key="max_new_tokens")
    prompts = _prompts(config)
    decoder = Decoder.from_config(config)
    require_same_tokens(decoder, config)
    reference = reference_decoder(decoder, config)
    tolerance = tie_tolerance(decoder, config)
    options = request_options(config)
    ready = [(prompt, encoded(prompt, decoder, key="verify.prompts")) for prompt in prompts]
    for _, ids in ready:
        decoder.begin(ids, **options)  # a mistake in an option is one now, and no failed run
    judged: list[_Judged] = []
    code = 0
    try:
        for prompt, ids in ready:
            try:
                expected = reference.generate(ids, **options)
                got = decoder.generate(ids, **options)
                verdict = compare(reference, ids, expected, got, tolerance=tolerance, **options)
                own = compare_with_the_model(
                    reference, ids, expected, tolerance=tolerance, **options
                )
            except GenerationError as error:
                error.args = (f"prompt {prompt.id!r}: {error}",)
                raise
            judged.append(_Judged(prompt, verdict, own))
            print(f"\r{len(judged)} of {len(prompts)}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt as interruption:
        code = exit_code(interruption)
    finally:  # what was judged until then is reported, whatever happened
        print(file=sys.stderr)
        facts = {
            "model": config.model.path or config.model.name,
            "strategy": config.strategy.name,
            "adapter": decoder.adapter_name,
            "execution": decoder.execution,
            "backend": getattr(config.backend, "name", config.backend),
            "reference_backend": config.verify.backend or getattr(config.backend, "name", None),
            "dtype": dtype_of(decoder),
            "tolerance": tolerance,
            "invariance_obstacle": decoder.invariance_obstacle,
            "generation_config": decoder.taken_from_model.values,
            "complete": len(judged) == len(prompts),
        }
        if config.format == "json":
            print(_as_json(facts, judged))
        else:
            print(_as_text(facts, judged, of=len(prompts)))
    return code or int(any("defect" in one.kinds for one in judged))


def _prompts(config: RunConfig) -> list[FilePrompt]:
    verify = config.verify
    if verify.prompts is None:
        if verify.limit:
            raise ConfigError("verify.limit needs verify.prompts", key="verify.limit")
        if config.prompt is None and config.prompt_file is None:
            raise ConfigError(
                'give prompts: verify.prompts=FILE.jsonl, or one: prompt="..."',
                key="verify.prompts",
            )
        return [FilePrompt("1", "prompt", read_prompt(config), chat=True)]
    if config.prompt is not None or config.prompt_file is not None:
        raise ConfigError("give verify.prompts or a prompt, not both", key="verify.prompts")
    return read_prompts(verify.prompts, limit=verify.limit, key="verify.prompts")


def _as_json(facts: dict[str, Any], judged: Sequence[_Judged]) -> str:
    whole = {
        **facts,
        "prompts": [
            {
                "id": one.prompt.id,
                "category": one.prompt.category,
                **asdict(one.verdict),
                "independent": independent_record(one.independent),
            }
            for one in judged
        ],
        **_counts(judged),
        "independent": _counts(judged, independent=True),
    }
    return json.dumps(whole, ensure_ascii=False)


def _as_text(facts: dict[str, Any], judged: Sequence[_Judged], *, of: int) -> str:
    parts = [
        f"{facts['strategy']} ({facts['adapter']}, {facts['backend']}) against autoregressive "
        f"({facts['reference_backend']}), {facts['model']}, {facts['dtype']}, "
        f"tie up to {facts['tolerance']:g}"
    ]
    obstacle = facts["invariance_obstacle"]
    parts.append(
        "the bits of a row do not depend on other rows"
        if obstacle is None
        else f"the last bits of a row may depend on other rows: {obstacle}"
    )
    if facts["generation_config"]:
        taken = facts["generation_config"].items()
        parts.append("generation_config: " + ", ".join(f"{name}={one}" for name, one in taken))
    if not facts["complete"]:
        parts.append(f"INCOMPLETE: {len(judged)} of {of} prompts were judged")
    if judged:
        parts.append(_counts_table(judged))
    parts += _apart((one.prompt.id, one.verdict) for one in judged)
    if judged:
        parts.append(_independent_line(judged))
    parts += _apart((one.prompt.id, one.independent.verdict) for one in judged)
    return "\n\n".join(parts)


def _apart(verdicts: Iterable[tuple[str, Verdict | None]]) -> list[str]:
    """Return the table of all places where answers part; nothing if there is none."""
    rows = [["prompt", "token", "expected", "got", "gap", ""]]
    for prompt, verdict in verdicts:
        if verdict is None:
            continue
        for parting in verdict.divergences:
            cells = (prompt, parting.position, parting.expected, parting.got)
            last = verdict.kind == "defect" and parting is verdict.divergences[-1]
            gap = "-" if parting.gap is None else f"{parting.gap:.3g}"
            rows.append([*map(_cell, cells), gap, "defect" if last else "tie"])
    return [render_table(rows)] if len(rows) > 1 else []


def _independent_line(judged: Sequence[_Judged]) -> str:
    """Return in words what the model's own forward pass says of autoregressive decoding."""
    counts = _counts(judged, independent=True)
    reasons = dict.fromkeys(one.independent.reason for one in judged if one.independent.reason)
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    parts = []
    if any(counts.values()):
        parts.append(f"autoregressive against the model's own forward pass: {found}")
    parts += [f"no independent reference: {reason}" for reason in reasons]
    return "\n".join(parts)


def _counts_table(judged: Sequence[_Judged]) -> str:
    categories = list(dict.fromkeys(one.prompt.category for one in judged))
    groups = [(name, [one for one in judged if one.prompt.category == name]) for name in categories]
    if len(groups) > 1:
        groups.append(("total", list(judged)))
    rows = [["", "prompts", "tokens", "equal", "tie", "defect"]]
    for name, group in groups:
        tokens = sum(one.verdict.tokens for one in group)
        rows.append([name, *map(str, (len(group), tokens, *_counts(group).values()))])
    return render_table(rows)


def _cell(value: object) -> str:
    return "end" if value is None else str(value)


def _counts(judged: Sequence[_Judged], *, independent: bool = False) -> dict[str, int]:
    kinds = ("equal", "tie", "defect")
    return {kind: sum(one.kinds[independent] == kind for one in judged) for kind in kinds}
