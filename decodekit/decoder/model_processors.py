"""What only a model's ``generation_config`` may ask for, as processors.

They follow the rules of ``decodekit.engine.processors``, with its shapes: nothing is kept between
two calls, and nothing that is given is written into.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decodekit.decoder.generation_defaults import GenerationDefaults
from decodekit.engine.processors import SuppressTokens
from decodekit.errors import ConfigError
from decodekit.interfaces.logits import LogitsProcessor

__all__ = [
    "EndBias",
    "ForcedTokens",
    "ModelProcessors",
    "SequenceBias",
    "SuppressAtLength",
    "banned_ids_of",
    "model_processors_of",
]


class SequenceBias:
    """Adds a number to the last token of each sequence wherever the prefix ends in all the others.

    Args:
        biases: What is added, by the token ids of a sequence.
    """

    def __init__(self, biases: Mapping[tuple[int, ...], float]) -> None:
        self._biases = dict(biases)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        changed = scores.clone()
        for (*head, last), bias in self._biases.items():
            if last >= scores.shape[1] or len(head) > input_ids.shape[1]:
                continue
            ending = input_ids[:, input_ids.shape[1] - len(head) :]
            wanted = torch.tensor(head, dtype=torch.int64).to(input_ids.device, non_blocking=True)
            matches = (ending == wanted).all(dim=-1)
            changed[:, last] += torch.where(matches, bias, 0.0).to(scores.dtype)
        return changed


class ForcedTokens:
    """Leaves only some tokens, all alike, after a prefix of one length.

    Args:
        ids: The tokens.
        length: L, the length of the prefix after which one of them comes.
    """

    def __init__(self, ids: Iterable[int], *, length: int) -> None:
        self._ids = [*ids]
        self._length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        if input_ids.shape[1] != self._length:
            return scores
        forced = torch.full_like(scores, float("-inf"))
        forced[:, [token for token in self._ids if token < scores.shape[1]]] = 0.0
        return forced


class SuppressAtLength:
    """Bans some tokens after a prefix of one length.

    Args:
        ids: The tokens.
        length: L, the length of the prefix after which they do not come.
    """

    def __init__(self, ids: Iterable[int], *, length: int) -> None:
        self._ban = SuppressTokens(ids)
        self._length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        return self._ban(input_ids, scores) if input_ids.shape[1] == self._length else scores


@dataclass(frozen=True, slots=True, kw_only=True)
class EndBias:
    """Makes the tokens that end a text likelier with every further token.

    Attributes:
        start: The length L of a prefix from which on it does.
        factor: By which their scores grow, as sizes, with each token beyond it.
        end_ids: The tokens that end a text.
    """

    start: int
    factor: float
    end_ids: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return the changed scores; see ``LogitsProcessor``."""
        beyond = input_ids.shape[1] - self.start
        if beyond <= 0:
            return scores
        ends = [token for token in self.end_ids if token < scores.shape[1]]
        marked = scores.new_zeros(scores.shape[1])
        # Far beyond any score the number need not grow further; it would leave the floats.
        least = min(beyond * math.log(self.factor), 60.0)
        marked[ends] = math.expm1(least)
        # A token that is banned stays so.
        return torch.where(scores == float("-inf"), scores, scores + scores.abs() * marked)


class ModelProcessors(NamedTuple):
    """What a model asks for, in the order of ``transformers``.

    Attributes:
        first: Before those of ``SamplingParams``.
        forced: Before the ban of ``suppress_tokens``.
        last: After all of them.
    """

    first: list[LogitsProcessor]
    forced: list[LogitsProcessor]
    last: list[LogitsProcessor]


def model_processors_of(
    defaults: GenerationDefaults,
    *,
    prompt_length: int,
    max_new_tokens: int,
    end_ids: Sequence[int],
) -> ModelProcessors:
    """Return what a model asks for beside ``SamplingParams``, in the order of ``transformers``.

    Args:
        defaults: What it asks for.
        prompt_length: Tokens of the prompt.
        max_new_tokens: Most new tokens; a token that is forced at the end is the last of these.
        end_ids: The tokens that end a text.

    Raises:
        ConfigError: A value is of another form than ``transformers`` takes.
    """
    wanted = defaults.further
    try:
        found = ModelProcessors([], [], [])
        if "sequence_bias" in wanted:
            found.first.append(SequenceBias(_biases(wanted["sequence_bias"])))
        if "forced_bos_token_id" in wanted:
            found.forced.append(ForcedTokens(_ids(wanted["forced_bos_token_id"]), length=1))
        if "forced_eos_token_id" in wanted:
            last = prompt_length + max_new_tokens - 1
            found.forced.append(ForcedTokens(_ids(wanted["forced_eos_token_id"]), length=last))
        if "exponential_decay_length_penalty" in wanted:
            start, factor = wanted["exponential_decay_length_penalty"]
            math.log(factor)  # a ValueError unless it is above 0
            found.forced.append(
                EndBias(
                    start=prompt_length + int(start), factor=float(factor), end_ids=tuple(end_ids)
                )
            )
        if "begin_suppress_tokens" in wanted:
            # A token that is forced after a prompt of one token comes first.
            moved = prompt_length == 1 and "forced_bos_token_id" in wanted
            ids = [token for token in _ids(wanted["begin_suppress_tokens"]) if token >= 0]
            found.last.append(SuppressAtLength(ids, length=prompt_length + moved))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's {defaults} cannot be used: {error}; set model.generation_defaults=false "
            "(generation_defaults=False of from_model)",
            key="model.generation_defaults",
        ) from error
    return found


def banned_ids_of(defaults: GenerationDefaults, *, end_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the runs of tokens that a model bans, without those that end a text on their own.

    Args:
        defaults: What it asks for.
        end_ids: The tokens that end a text.
    """
    runs = [tuple(map(int, run)) for run in defaults.further.get("bad_words_ids", ())]
    return [run for run in runs if run and not (len(run) == 1 and run[0] in end_ids)]


def _ids(given: Any) -> list[int]:
    return [int(token) for token in (given if isinstance(given, (list, tuple)) else [given])]


def _biases(given: Any) -> dict[tuple[int, ...], float]:
    """Return biases by sequence; in a file they are a list of pairs."""
    pairs = given.items() if isinstance(given, Mapping) else given
    return {tuple(map(int, tokens)): float(bias) for tokens, bias in pairs}
