"""What a benchmark compares: our strategies, and ``transformers``' own ``generate``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from decodekit.bench.measurement import Contender, Run
from decodekit.decoder import Decoder
from decodekit.errors import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["baseline", "check_baseline", "names_of", "strategy"]

_BASELINES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "prompt_lookup": {"prompt_lookup_num_tokens": 10},
}


class _StrategyContender:
    def __init__(self, name: str, decoder: Decoder) -> None:
        self.name = name
        self._decoder = decoder

    def run(self, prompt: list[int], max_new_tokens: int) -> Run:
        result = self._decoder.generate(prompt, max_new_tokens=max_new_tokens)
        stats = result.stats
        return Run(
            tokens=result.tokens,
            steps=stats.steps,
            rows_per_step=stats.rows_per_step,
            seconds=stats.seconds,
            time_to_first_token=stats.time_to_first_token,
            host_seconds=stats.seconds - stats.forward_seconds,
        )


class _TransformersContender:
    def __init__(self, name: str, model: Any, options: dict[str, Any]) -> None:
        self.name = name
        self._model = model
        self._options = options

    def run(self, prompt: list[int], max_new_tokens: int) -> Run:
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        hook = self._model.register_forward_pre_hook(count)
        ids = torch.tensor([prompt], device=self._model.device)
        start = time.perf_counter()
        try:
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                # Plain greedy, whatever the checkpoint brings along.
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                **self._options,
            )
        finally:
            hook.remove()
        seconds = time.perf_counter() - start
        return Run(
            tokens=output[0, len(prompt) :].tolist(),
            steps=passes,
            rows_per_step=None,
            seconds=seconds,
            time_to_first_token=None,
        )


def names_of(strategies: Sequence[Any], baselines: Sequence[str]) -> list[str]:
    """Return the names of the contenders, before any of them is made.

    Args:
        strategies: As ``strategy`` takes each.
        baselines: As ``baseline`` takes each.
    """
    return [*map(_strategy_name, strategies), *map(_baseline_name, baselines)]


def _strategy_name(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return str(settings)
    extra = ",".join(f"{key}={value}" for key, value in settings.items() if key != "name")
    return f"{settings.get('name')}({extra})" if extra else str(settings.get("name"))


def _baseline_name(name: str) -> str:
    return f"transformers {name}"


def strategy(decoder: Decoder, settings: Any) -> Contender:
    """Return a strategy as a contender.

    Args:
        decoder: Gives the model.
        settings: A name, or a mapping with ``name`` and settings.
    """
    values = dict(settings) if isinstance(settings, Mapping) else settings
    return _StrategyContender(_strategy_name(settings), decoder.with_strategy(values))


def check_baseline(name: str) -> None:
    """Check the name of a baseline.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in _BASELINES:
        hint = nearest(str(name), _BASELINES)
        raise ConfigError(f"unknown baseline {name!r}: {hint}", key="bench.baselines")


def baseline(model: PreTrainedModel, name: str) -> Contender:
    """Return ``transformers``' own ``generate`` as a contender.

    Args:
        model: As transformers loads it, with nothing of ours in it.
        name: ``greedy``, or ``prompt_lookup`` with 10 tokens.

    Raises:
        ConfigError: There is no such baseline, or the model is none of ``transformers``.
    """
    check_baseline(name)
    if not hasattr(model, "generate"):
        raise ConfigError(
            f"the baselines are transformers' own generate, which a {type(model).__name__} does "
            "not have; set bench.baselines=[]",
            key="bench.baselines",
        )
    return _TransformersContender(_baseline_name(name), model, _BASELINES[name])
