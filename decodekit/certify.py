"""``job=verify``: run prompts under autoregressive decoding and under the given setting."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decodekit.certificate import TOLERANCES, Verdict, compare
from decodekit.config import RunConfig
from decodekit.decoder import Decoder
from decodekit.errors import ConfigError
from decodekit.factory import build_adapter
from decodekit.generate import read_prompt, request_options, require_same_tokens
from decodekit.prompt_files import FilePrompt, encoded, read_prompts
from decodekit.signals import exit_code
from decodekit.table import render_table

__all__ = ["run_verify"]


@dataclass(frozen=True, slots=True)
class _Judged:
    prompt: FilePrompt
    verdict: Verdict


def run_verify(config: RunConfig) -> int:
    """Run ``job=verify``: a report to standard output, progress to standard error.

    Returns:
        The exit code: 0 if there is no defect.

    Raises:
        ConfigError: There are no prompts, or the setting need not give the same tokens.
    """
    prompts = _prompts(config)
    decoder = Decoder.from_config(config)
    require_same_tokens(decoder, config)
    reference = _reference(decoder, config)
    dtype = _dtype(decoder, config)
    tolerance = config.verify.tolerance
    if tolerance is None:
        tolerance = TOLERANCES.get(dtype, TOLERANCES["float32"])
    options = request_options(config)
    judged: list[_Judged] = []
    code = 0
    try:
        for prompt in prompts:
            ids = encoded(prompt, decoder, key="verify.prompts")
            verdict = compare(
                reference,
                ids,
                reference.generate(ids, **options),
                decoder.generate(ids, **options),
                tolerance=tolerance,
                **options,
            )
            judged.append(_Judged(prompt, verdict))
            print(f"\r{len(judged)} of {len(prompts)}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt as interruption:
        code = exit_code(interruption)  # what was judged until then is still reported
    print(file=sys.stderr)
    facts = {
        "model": config.model.path or config.model.name,
        "strategy": config.strategy.name,
        "backend": getattr(config.backend, "name", config.backend),
        "reference_backend": config.verify.backend or getattr(config.backend, "name", None),
        "dtype": dtype,
        "tolerance": tolerance,
        "complete": code == 0,
    }
    print(_as_json(facts, judged) if config.format == "json" else _as_text(facts, judged))
    return code or int(any(one.verdict.kind == "defect" for one in judged))


def _prompts(config: RunConfig) -> list[FilePrompt]:
    verify = config.verify
    if verify.prompts is None:
        if verify.limit:
            raise ConfigError("verify.limit needs verify.prompts", key="verify.limit")
        return [FilePrompt("1", "prompt", read_prompt(config), chat=True)]
    if config.prompt is not None or config.prompt_file is not None:
        raise ConfigError("give verify.prompts or a prompt, not both", key="verify.prompts")
    return read_prompts(verify.prompts, limit=verify.limit, key="verify.prompts")


def _reference(decoder: Decoder, config: RunConfig) -> Decoder:
    """Return the autoregressive decoder over the same model, with its own backend if asked for."""
    plain = decoder.with_strategy("autoregressive", verifier="exact_match")
    if config.verify.backend is None:
        return plain
    model = getattr(decoder.adapter, "model", None)
    if model is None:
        raise ConfigError("verify.backend needs an adapter with a model", key="verify.backend")
    plain.adapter = build_adapter(model, adapter=config.adapter, backend=config.verify.backend)
    return plain


def _dtype(decoder: Decoder, config: RunConfig) -> str:
    model = getattr(decoder.adapter, "model", None)
    return str(getattr(model, "dtype", config.dtype)).removeprefix("torch.")


def _as_json(facts: dict[str, Any], judged: Sequence[_Judged]) -> str:
    whole = {
        **facts,
        "prompts": [
            {
                "id": one.prompt.id,
                "category": one.prompt.category,
                **asdict(one.verdict),
            }
            for one in judged
        ],
        **_counts(judged),
    }
    return json.dumps(whole, ensure_ascii=False)


def _as_text(facts: dict[str, Any], judged: Sequence[_Judged]) -> str:
    categories = list(dict.fromkeys(one.prompt.category for one in judged))
    groups = [(name, [one for one in judged if one.prompt.category == name]) for name in categories]
    if len(groups) > 1:
        groups.append(("total", list(judged)))
    rows = [["", "prompts", "tokens", "equal", "tie", "defect"]]
    for name, group in groups:
        counts = _counts(group)
        tokens = sum(one.verdict.tokens for one in group)
        rows.append([name, *map(str, (len(group), tokens, *counts.values()))])
    parts = [
        f"{facts['strategy']} ({facts['backend']}) against autoregressive "
        f"({facts['reference_backend']}), {facts['model']}, {facts['dtype']}, "
        f"tie up to {facts['tolerance']:g}",
        render_table(rows),
    ]
    apart = [["prompt", "token", "expected", "got", "gap", ""]]
    for one in judged:
        parting = one.verdict.divergence
        if parting is not None:
            gap = "-" if parting.gap is None else f"{parting.gap:.3g}"
            cells = (one.prompt.id, parting.position, parting.expected, parting.got, gap)
            apart.append([*map(_cell, cells), one.verdict.kind])
    if len(apart) > 1:
        parts.append(render_table(apart))
    return "\n\n".join(parts)


def _cell(value: object) -> str:
    return "end" if value is None else str(value)


def _counts(judged: Sequence[_Judged]) -> dict[str, int]:
    kinds = ("equal", "tie", "defect")
    return {kind: sum(one.verdict.kind == kind for one in judged) for kind in kinds}
