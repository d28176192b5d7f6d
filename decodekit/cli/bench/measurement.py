"""What a benchmark measures, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from decodekit.decoder.runs import first_difference

__all__ = ["Contender", "Measurement", "Run", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer and what it cost.

    Attributes:
        tokens: The new token ids.
        steps: Forward passes.
        rows_per_step: Mean rows of a pass, the prompt's not counted; None if unknown.
        seconds: Wall time, prefill included.
        time_to_first_token: Wall time in seconds; None if unknown.
        host_seconds: Wall time outside the model's forward passes; None if unknown.
    """

    tokens: list[int]
    steps: int
    rows_per_step: float | None
    seconds: float
    time_to_first_token: float | None
    host_seconds: float | None = None


class Contender(Protocol):
    """Something that continues token ids greedily."""

    name: str

    def run(self, prompt: list[int], max_new_tokens: int) -> Run:
        """Continue ``prompt`` by at most ``max_new_tokens`` tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One contender on one prompt, once.

    Attributes:
        prompt: The prompt's id.
        category: The prompt's category.
        contender: The contender's name.
        repeat: Which time, from 0.
        equal: Whether the tokens are those of the reference contender on this prompt.
        run: What was measured.
    """

    prompt: str
    category: str
    contender: str
    repeat: int
    equal: bool
    run: Run


def measure(
    contenders: list[Contender],
    prompts: list[tuple[str, str, list[int]]],
    *,
    reference: str,
    max_new_tokens: int,
    repeats: int,
) -> Iterator[Measurement]:
    """Yield measurements in turns: for each prompt each contender once, in an order that changes.

    Each contender is warmed up first. What a machine does in the background then hits all alike,
    and the report compares contenders prompt by prompt.

    Args:
        contenders: What is compared.
        prompts: Id, category and token ids of each.
        reference: The name of the contender that gives the tokens that the others should give.
        max_new_tokens: Most new tokens.
        repeats: Times that each prompt is run.
    """
    for contender in contenders:
        contender.run(prompts[0][2], min(8, max_new_tokens))
    for repeat in range(repeats):
        for number, (name, category, ids) in enumerate(prompts):
            runs = {
                contender.name: contender.run(ids, max_new_tokens)
                for contender in _in_turn(contenders, number + repeat)
            }
            expected = runs[reference].tokens
            for contender in contenders:
                run = runs[contender.name]
                yield Measurement(
                    prompt=name,
                    category=category,
                    contender=contender.name,
                    repeat=repeat,
                    equal=first_difference(expected, run.tokens) is None,
                    run=run,
                )


def _in_turn(contenders: list[Contender], turn: int) -> list[Contender]:
    """Return the contenders in the order of a turn.

    The order rotates, so that each has every place about equally often, and after each round it is
    turned around, so that none always runs right after the same one.
    """
    rounds, shift = divmod(turn, len(contenders))
    order = [*contenders[shift:], *contenders[:shift]]
    return order[::-1] if rounds % 2 else order
