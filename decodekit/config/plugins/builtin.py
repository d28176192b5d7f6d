"""The components that come with decodekit, registered through the plugin hooks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodekit.backends.triton.backend import TritonConfig
from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.rejection import RejectionVerifier
from decodekit.errors import ModelSupportError
from decodekit.hookspecs import hookimpl
from decodekit.interfaces.adapter import ModelAdapter
from decodekit.interfaces.backend import AttentionBackend
from decodekit.interfaces.component import Component
from decodekit.interfaces.strategy import Parts, Strategy
from decodekit.interfaces.verifier import Verifier
from decodekit.strategies.autoregressive import Autoregressive, AutoregressiveConfig
from decodekit.strategies.draft_model import DraftModel, DraftModelConfig
from decodekit.strategies.jacobi import Jacobi, JacobiConfig
from decodekit.strategies.lookahead.pool import RecentNGramPool, RecentPoolConfig
from decodekit.strategies.lookahead.proposer import Lookahead, LookaheadConfig
from decodekit.strategies.prompt_lookup import PromptLookup, PromptLookupConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "AutoAdapterConfig",
    "AutoBackendConfig",
    "EagerConfig",
    "ExactMatchConfig",
    "FlashConfig",
    "FlexConfig",
    "HFConfig",
    "InvariantConfig",
    "LlamaAdapterConfig",
    "RejectionConfig",
    "SDPAConfig",
]


@dataclass(kw_only=True)
class AutoBackendConfig:
    """Settings of ``backend=auto``, a kernel by device and dtype: there are none."""

    name: str = "auto"


@dataclass(kw_only=True)
class InvariantConfig:
    """Settings of ``backend=invariant``: there are none."""

    name: str = "invariant"


@dataclass(kw_only=True)
class EagerConfig:
    """Settings of ``backend=eager``: there are none."""

    name: str = "eager"


@dataclass(kw_only=True)
class SDPAConfig:
    """Settings of ``backend=sdpa``: there are none."""

    name: str = "sdpa"


@dataclass(kw_only=True)
class FlashConfig:
    """Settings of ``backend=flash``: there are none."""

    name: str = "flash"


@dataclass(kw_only=True)
class FlexConfig:
    """Settings of ``backend=flex``.

    Attributes:
        compile: Compile the kernel; otherwise it runs step by step, with all scores in memory.
    """

    name: str = "flex"
    compile: bool = True


@dataclass(kw_only=True)
class HFConfig:
    """Settings of ``adapter=hf``: there are none."""

    name: str = "hf"


@dataclass(kw_only=True)
class LlamaAdapterConfig:
    """Settings of ``adapter=llama``: there are none."""

    name: str = "llama"


@dataclass(kw_only=True)
class AutoAdapterConfig:
    """Settings of ``adapter=auto``, ``llama`` where it fits and else ``hf``: there are none."""

    name: str = "auto"


@dataclass(kw_only=True)
class ExactMatchConfig:
    """Settings of ``verifier=exact_match``: there are none."""

    name: str = "exact_match"


@dataclass(kw_only=True)
class RejectionConfig:
    """Settings of ``verifier=rejection``: there are none."""

    name: str = "rejection"


def _auto_backend(config: AutoBackendConfig) -> AttentionBackend:
    from decodekit.backends.auto import AutoBackend

    return AutoBackend(
        plain=_sdpa(SDPAConfig()),
        complete=_eager(EagerConfig()),
        half=_invariant(InvariantConfig()),
    )


def _invariant(config: InvariantConfig) -> AttentionBackend:
    from decodekit.backends.invariant.backend import InvariantBackend

    return InvariantBackend()


def _eager(config: EagerConfig) -> AttentionBackend:
    from decodekit.backends.eager import EagerBackend

    return EagerBackend()


def _sdpa(config: SDPAConfig) -> AttentionBackend:
    from decodekit.backends.sdpa import SDPABackend

    return SDPABackend()


def _flash(config: FlashConfig) -> AttentionBackend:
    from decodekit.backends.flash import FlashBackend

    return FlashBackend()


def _flex(config: FlexConfig) -> AttentionBackend:
    # Imported here: torch's compiler is behind it.
    from decodekit.backends.flex import FlexBackend

    return FlexBackend(compiled=config.compile)


def _triton(config: TritonConfig) -> AttentionBackend:
    from decodekit.backends.triton.backend import TritonBackend

    return TritonBackend(config)


def _hf(config: HFConfig, model: PreTrainedModel, backend: AttentionBackend) -> ModelAdapter:
    # Imported here: transformers takes seconds, and `import decodekit` must not.
    from decodekit.adapters.hf import HFAdapter

    return HFAdapter(model, backend)


def _llama(
    config: LlamaAdapterConfig, model: PreTrainedModel, backend: AttentionBackend
) -> ModelAdapter:
    from decodekit.adapters.llama import LlamaAdapter

    return LlamaAdapter(model, backend)


def _auto(
    config: AutoAdapterConfig, model: PreTrainedModel, backend: AttentionBackend
) -> ModelAdapter:
    from decodekit.adapters.hf import HFAdapter
    from decodekit.adapters.llama import LlamaAdapter, obstacle

    if obstacle(model) is None:
        with suppress(ModelSupportError):  # found out on trial
            return LlamaAdapter(model, backend)
    return HFAdapter(model, backend)


def _recent(config: RecentPoolConfig) -> RecentNGramPool:
    return RecentNGramPool(per_key=config.per_key, max_keys=config.max_keys)


def _autoregressive(config: AutoregressiveConfig, parts: Parts) -> Strategy:
    return Autoregressive(config)


def _jacobi(config: JacobiConfig, parts: Parts) -> Strategy:
    return Jacobi(config)


def _prompt_lookup(config: PromptLookupConfig, parts: Parts) -> Strategy:
    return PromptLookup(config)


def _exact_match(config: ExactMatchConfig) -> Verifier:
    return ExactMatchVerifier()


def _rejection(config: RejectionConfig) -> Verifier:
    return RejectionVerifier()


@hookimpl
def decodekit_register_strategies() -> list[Component]:
    """Return the strategies."""
    return [
        Component("autoregressive", AutoregressiveConfig, _autoregressive),
        Component("draft_model", DraftModelConfig, DraftModel),
        Component("jacobi", JacobiConfig, _jacobi),
        Component("lookahead", LookaheadConfig, Lookahead),
        Component("prompt_lookup", PromptLookupConfig, _prompt_lookup),
    ]


@hookimpl
def decodekit_register_pools() -> list[Component]:
    """Return the one pool."""
    return [Component("recent", RecentPoolConfig, _recent)]


@hookimpl
def decodekit_register_backends() -> list[Component]:
    """Return the backends; what a kernel needs is looked for when one is built or first used."""
    return [
        Component("auto", AutoBackendConfig, _auto_backend),
        Component("eager", EagerConfig, _eager),
        Component("flash", FlashConfig, _flash),
        Component("flex", FlexConfig, _flex),
        Component("invariant", InvariantConfig, _invariant),
        Component("sdpa", SDPAConfig, _sdpa),
        Component("triton", TritonConfig, _triton),
    ]


@hookimpl
def decodekit_register_adapters() -> list[Component]:
    """Return the adapters for transformers models."""
    return [
        Component("auto", AutoAdapterConfig, _auto),
        Component("hf", HFConfig, _hf),
        Component("llama", LlamaAdapterConfig, _llama),
    ]


@hookimpl
def decodekit_register_verifiers() -> list[Component]:
    """Return the verifiers."""
    return [
        Component("exact_match", ExactMatchConfig, _exact_match),
        Component("rejection", RejectionConfig, _rejection),
    ]
