"""What a text is compared with: a decoder that does without guesses."""

from __future__ import annotations

from decodekit.cli.verify.certificate import tolerance_for
from decodekit.config.schema import RunConfig
from decodekit.decoder.build import build_adapter
from decodekit.decoder.decoder import Decoder
from decodekit.errors import ConfigError

__all__ = ["reference_decoder", "require_same_tokens", "tie_tolerance"]


def require_same_tokens(decoder: Decoder, config: RunConfig) -> None:
    """Refuse to compare tokens where only their distribution has to be the same.

    Raises:
        ConfigError: The verifier is of that kind, and tokens are drawn.
    """
    if config.sampling.temperature > 0 and not getattr(decoder.verifier, "same_tokens", True):
        raise ConfigError(
            "under sampling this verifier gives the same distribution, not the same tokens; "
            "compare with sampling=greedy",
            key="verifier",
        )


def reference_decoder(decoder: Decoder, config: RunConfig) -> Decoder:
    """Return the autoregressive decoder over the same model; ``verify.backend`` is its backend.

    Raises:
        ConfigError: Another backend is asked for, and the adapter has no model.
    """
    plain = decoder.with_strategy("autoregressive", verifier="exact_match")
    if config.verify.backend is None:
        return plain
    model = getattr(decoder.adapter, "model", None)
    if model is None:
        raise ConfigError("verify.backend needs an adapter with a model", key="verify.backend")
    plain.adapter = build_adapter(
        model,
        adapter=config.adapter,
        backend=config.verify.backend,
        max_positions=config.model.max_positions,
    )
    return plain


def tie_tolerance(decoder: Decoder, config: RunConfig) -> float:
    """Return the largest gap of a tie: ``verify.tolerance``, or that of the model's dtype."""
    given = config.verify.tolerance
    return tolerance_for(decoder) if given is None else given
