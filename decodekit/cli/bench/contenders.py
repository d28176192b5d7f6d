"""What a benchmark compares: our strategies, and ``transformers``' own ``generate``."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from decodekit.cli.bench.measurement import Contender, Run
from decodekit.decoder.decoder import Decoder
from decodekit.decoder.generation_defaults import defaults_of
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
    def __init__(
        self, name: str, model: Any, options: dict[str, Any], generation_config: Any
    ) -> None:
        self.name = name
        self._model = model
        self._options = options
        self._generation_config = generation_config

    def run(self, prompt: list[int], max_new_tokens: int) -> Run:
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        own = self._model.generation_config
        hook = self._model.register_forward_pre_hook(count)
        ids = torch.tensor([prompt], device=self._model.device)
        start = time.perf_counter()
        try:
            self._model.generation_config = self._generation_config
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                **self._options,
            )
        finally:
            hook.remove()
            self._model.generation_config = own
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


def baseline(model: PreTrainedModel, name: str, *, generation_defaults: bool = True) -> Contender:
    """Return ``transformers``' own ``generate`` as a contender.

    Args:
        model: As transformers loads it, with nothing of ours in it.
        name: ``greedy``, or ``prompt_lookup`` with 10 tokens.
        generation_defaults: Whether it heeds what the model's ``generation_config`` asks for, as
            far as we do.

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
    config = _generation_config(model, generation_defaults)
    return _TransformersContender(_baseline_name(name), model, _BASELINES[name], config)


def _generation_config(model: Any, generation_defaults: bool) -> Any:
    """Return the configuration under which ``generate`` is asked for what we do."""
    config = copy.deepcopy(model.generation_config)
    if generation_defaults:
        off = defaults_of(model, vocab_size=model.config.vocab_size).unsupported
    else:
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        off = tuple(name for name in config.to_dict() if name not in tokens)
    for name in off:
        setattr(config, name, None)
    return config
