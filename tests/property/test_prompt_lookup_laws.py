"""The index of prompt lookup finds what a scan of the whole text finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decodekit.interfaces import Budget
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.strategies.prompt_lookup import PromptLookup, PromptLookupConfig


def scan(text: list[int], config: PromptLookupConfig, length: int) -> list[int]:
    """Return the draft after the longest, then latest, earlier occurrence of the text's end."""
    for size in range(config.max_ngram_size, config.min_ngram_size - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                draft = list(text)
                while len(draft) < len(text) + length:  # copy, also from the copy itself
                    draft.append(draft[start + size + len(draft) - len(text)])
                return draft[len(text) :]
    return []


@given(
    runs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    num_tokens=st.integers(1, 6),
    budget=st.builds(Budget, st.integers(0, 8), st.integers(0, 8), st.integers(1, 8)),
)
def test_drafts_are_those_of_a_scan(
    runs: list[list[int]], sizes: list[int], num_tokens: int, budget: Budget
) -> None:
    config = PromptLookupConfig(
        num_tokens=num_tokens, min_ngram_size=sizes[0], max_ngram_size=sizes[1]
    )
    proposer = PromptLookup(config).new_proposer(SamplingParams())
    text: list[int] = []
    for run in runs:  # the text grows by accepted runs, and each draft sees all of it
        text += run
        length = max(min(num_tokens, budget.nodes, budget.useful_depth), 0)
        drafted = proposer.propose(text, budget).tree.tokens
        assert list(drafted) == (scan(text, config, length) if length else [])
