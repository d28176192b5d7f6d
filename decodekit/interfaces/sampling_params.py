"""How a request wants its tokens chosen: plain numbers, without torch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decodekit.errors import ConfigError, shortened

__all__ = ["FILTERS", "SamplingParams"]

FILTERS = frozenset(
    {
        "top_n_sigma",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "xtc_probability",
        "xtc_threshold",
    }
)
"""Settings that rule tokens out of a draw; they have no effect under greedy decoding."""

_LARGEST = 1e38  # logits are float32, and a few of these may be added up


@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are chosen. The defaults are plain greedy decoding.

    The penalties and bans come first, on the logits of the model, each row on its own prefix; then
    the temperature and the filters.

    Attributes:
        temperature: Divides the logits; 0 is greedy decoding, and the filters have no effect.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the fewest most probable tokens whose probability sums to ``top_p`` or more.
        min_p: Keep the tokens that have ``min_p`` times the probability of the best or more.
        typical_p: Keep the fewest tokens whose information is closest to what is expected, and
            whose probability sums to ``typical_p`` or more (Meister et al., 2022,
            arXiv 2202.00666); 1 is off.
        epsilon_cutoff: Keep the tokens of this probability or more, and the best (Hewitt et al.,
            2022, arXiv 2210.15191); 0 is off.
        eta_cutoff: The same, but lower where the entropy H is high: the smaller one of
            ``eta_cutoff`` and ``sqrt(eta_cutoff) * exp(-H)`` (ibid.); 0 is off.
        top_n_sigma: Keep the tokens whose logit is at most so many standard deviations of all
            logits below the best (Tang et al., 2024, arXiv 2411.07641); 0 is off.
        xtc_probability: The chance that the most probable tokens of a draw are left out: of those
            that have ``xtc_threshold`` or more, all but the least probable ("exclude top choices");
            0 is off.
        xtc_threshold: The probability from which on a token counts as a top choice.
        seed: Keys the draws; the same seed gives the same tokens.
        repetition_penalty: Divides the positive logits of tokens of the prompt and the answer, and
            multiplies the negative ones (Keskar et al., 2019, arXiv 1909.05858); 1 is off.
        presence_penalty: Taken off the logits of tokens that the answer has; 0 is off.
        frequency_penalty: Taken off them once for every time that the answer has them; 0 is off.
        dry_multiplier: Scales what is taken off the logit of a token that would go on with a
            repetition ("don't repeat yourself"); 0 is off. Where the last n tokens came before, and
            the token after them, that is ``dry_multiplier * dry_base ** (n - dry_allowed_length)``
            for the longest such n, if it is ``dry_allowed_length`` or more.
        dry_base: 1 or more.
        dry_allowed_length: The shortest run of tokens whose repetition costs something.
        dry_sequence_breakers: Texts that no repetition reaches over; tokens that hold such a text
            are not penalised.
        dry_range: Only so many of the last tokens are looked at, the prompt's included; 0 looks
            at all.
        no_repeat_ngram_size: No run of so many tokens comes twice, the prompt's included; 0 is off.
        min_new_tokens: No end-of-text token, and no stop token, before so many tokens.
        bad_words: Texts that are not in the answer, whatever tokens they would come as.
        logit_bias: Added to the logits, by token id.
        suppress_tokens: Token ids that are never produced.

    Raises:
        ConfigError: A value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: list[str] = field(default_factory=lambda: ["\n", ":", '"', "*"])
    dry_range: int = 0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    bad_words: list[str] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    suppress_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in (
            "top_k",
            "seed",
            "no_repeat_ngram_size",
            "min_new_tokens",
            "dry_allowed_length",
            "dry_range",
        ):
            _require(_is_whole(getattr(self, name)), name, "a whole number", self)
            setattr(self, name, int(getattr(self, name)))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
            "top_n_sigma",
            "xtc_probability",
            "xtc_threshold",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "dry_multiplier",
            "dry_base",
        ):
            _require(_is_number(getattr(self, name)), name, "a number", self)
            setattr(self, name, float(getattr(self, name)))
        for name, ok, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("typical_p", 0 < self.typical_p <= 1, "in (0, 1], where 1 is off"),
            ("epsilon_cutoff", 0 <= self.epsilon_cutoff < 1, "in [0, 1), where 0 is off"),
            ("eta_cutoff", 0 <= self.eta_cutoff < 1, "in [0, 1), where 0 is off"),
            ("top_n_sigma", 0 <= self.top_n_sigma < math.inf, "0 (off) or more"),
            ("xtc_probability", 0 <= self.xtc_probability <= 1, "in [0, 1], where 0 is off"),
            ("xtc_threshold", 0 < self.xtc_threshold <= 1, "in (0, 1]"),
            ("seed", 0 <= self.seed < 2**64, "in [0, 2**64)"),
            (
                "repetition_penalty",
                1e-6 <= self.repetition_penalty <= 1e6,
                "in [1e-6, 1e6], where 1 is off",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= _LARGEST, f"at most {_LARGEST:g}"),
            ("frequency_penalty", abs(self.frequency_penalty) <= _LARGEST, f"at most {_LARGEST:g}"),
            ("dry_multiplier", 0 <= self.dry_multiplier <= _LARGEST, "0 (off) or more"),
            ("dry_base", 1 <= self.dry_base <= _LARGEST, "1 or more"),
            ("dry_allowed_length", self.dry_allowed_length >= 1, "1 or more"),
            (
                "dry_sequence_breakers",
                _all(self.dry_sequence_breakers, _is_text) and all(self.dry_sequence_breakers),
                "a list of texts that are not empty",
            ),
            ("dry_range", self.dry_range >= 0, "0 (all tokens) or more"),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size >= 0, "0 (off) or more"),
            ("min_new_tokens", self.min_new_tokens >= 0, "0 or more"),
            ("bad_words", _all(self.bad_words, _is_text), "a list of texts"),
            ("suppress_tokens", _all(self.suppress_tokens, _is_token), "a list of token ids"),
            (
                "logit_bias",
                isinstance(self.logit_bias, dict)
                and _all(list(self.logit_bias), _is_token)
                and _all(list(self.logit_bias.values()), _is_bias),
                "a mapping from token ids to finite numbers (or -inf, a ban)",
            ),
        ):
            _require(ok, name, rule, self)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the temperature and the filters is switched on."""
        return any(getattr(self, name) != off for name, off in _OFF.items())


_OFF: dict[str, Any] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "bad_words": [],
    "logit_bias": {},
    "suppress_tokens": [],
}
"""What changes logits, and where each does not."""


def _require(ok: bool, name: str, rule: str, params: SamplingParams) -> None:
    if not ok:
        value = getattr(params, name)
        raise ConfigError(f"{name} must be {rule}, not {shortened(value)}", key=name, value=value)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return isinstance(value, float) or bool(-_LARGEST <= value <= _LARGEST)  # type: ignore[operator]  # an int has any size


def _is_token(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_bias(value: Any) -> bool:
    """Return whether a bias is a float32 number, or -inf, which is a ban."""
    return _is_number(value) and (value == -math.inf or abs(value) <= _LARGEST)


def _is_text(value: object) -> bool:
    """Return whether a value is text that can be encoded: no half of a surrogate pair."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _all(values: object, check: Callable[[object], bool]) -> bool:
    return isinstance(values, (list, tuple)) and all(map(check, values))
