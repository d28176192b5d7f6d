"""What a benchmark measures, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

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
        equal: Whether the tokens are those of the first contender on this prompt.
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
    max_new_tokens: int,
    repeats: int,
) -> Iterator[Measurement]:
    """Yield measurements in turns: for each prompt each contender once, in a rotating order.

    Each contender is warmed up first. What a machine does in the background then hits all alike,
    and the report compares contenders prompt by prompt.

    Args:
        contenders: What is compared; the first gives the tokens that the others should give.
        prompts: Id, category and token ids of each.
        max_new_tokens: Most new tokens.
        repeats: Times that each prompt is run.
    """
    for contender in contenders:
        contender.run(prompts[0][2], min(8, max_new_tokens))
    for repeat in range(repeats):
        for number, (name, category, ids) in enumerate(prompts):
            shift = (number + repeat) % len(contenders)
            runs = {
                contender.name: contender.run(ids, max_new_tokens)
                for contender in [*contenders[shift:], *contenders[:shift]]
            }
            expected = runs[contenders[0].name].tokens
            for contender in contenders:
                yield Measurement(
                    prompt=name,
                    category=category,
                    contender=contender.name,
                    repeat=repeat,
                    equal=runs[contender.name].tokens == expected,
                    run=runs[contender.name],
                )
