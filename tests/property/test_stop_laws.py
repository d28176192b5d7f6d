"""Where a text ends, over random tokens, stops and runs, against one naive definition.

The definition looks at a whole list of tokens at once: it knows no runs, no stream and no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit import Decoder
from decodekit.engine.detokenizer import IncrementalText
from decodekit.engine.stopping import StopRules
from decodekit.interfaces import Budget, Proposal, StepOutcome
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import TokenTree
from tests.support.fakes import ByteTokenizer, ToyAdapter, cut

BROKEN = "\ufffd"
SPECIAL = 0  # this token has no text


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tokens with their texts, all that may end them, and where runs end.

    ``says_yes`` are the numbers of tokens at which a criterion ends the text.
    """

    pieces: tuple[bytes, ...]
    tokens: tuple[int, ...]
    limit: int
    edges: tuple[int, ...] = ()
    eos: frozenset[int] = frozenset()
    sequences: tuple[tuple[int, ...], ...] = ()
    strings: tuple[str, ...] = ()
    says_yes: frozenset[int] = frozenset()

    @property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer(self.pieces, special=[SPECIAL])

    @property
    def runs(self) -> list[tuple[int, ...]]:
        edges = sorted({0, *self.edges, len(self.tokens)})
        return [self.tokens[start:end] for start, end in pairwise(edges)]

    def decode(self, count: int) -> str:
        """Return the text of the first tokens, whatever it is."""
        return self.tokenizer.decode(self.tokens[:count], skip_special_tokens=True)

    def whole(self, count: int) -> str:
        """Return the text of the first tokens without a last character that is not whole."""
        return next(t for n in range(count, -1, -1) if not (t := self.decode(n)).endswith(BROKEN))


@dataclass(frozen=True)
class End:
    """Where a text ends; the reason is None if it does not."""

    tokens: tuple[int, ...]
    text: str
    reason: str | None


def naive(case: Case) -> End:
    """Return where the text ends: the definition."""
    for count in range(1, len(case.tokens) + 1):
        head = case.tokens[:count]
        eos = head[-1] in case.eos
        runs = [len(run) for run in case.sequences if head[-len(run) :] == run]
        yes = count in case.says_yes
        if eos or runs or yes or count == case.limit:  # no byte can come any more
            text, kept = case.decode(count), case.decode(count - max(runs, default=0))
        else:
            text = kept = case.whole(count)
        places = [place for place in map(text.find, case.strings) if place >= 0]
        reason = (
            "eos"
            if eos
            else "stop"
            if runs or yes or places
            else "length"
            if count == case.limit
            else None
        )
        if reason is not None:
            kept = text if eos else kept
            return End(head, kept[: min(places, default=len(kept))], reason)
    return End(case.tokens, case.whole(len(case.tokens)), None)


def certain(case: Case, count: int) -> str:
    """Return the text of the first tokens that nothing can take back: no less and no more."""
    text, tokens = case.whole(count), case.tokens[:count]
    heads = {string[:end] for string in case.strings for end in range(1, len(string))}
    held = max((len(head) for head in heads if text.endswith(head)), default=0)
    starts = {run[:end] for run in case.sequences for end in range(1, len(run))}
    begun = max((len(start) for start in starts if tokens[-len(start) :] == start), default=0)
    return text[: min(len(text) - held, len(case.whole(count - begun)))]


def by_rules(case: Case) -> tuple[End, list[str]]:
    """Return where the stop rules end the text, and what is shown after each run."""
    text = IncrementalText(
        case.tokenizer, stop=case.strings, undo=max(map(len, case.sequences), default=0)
    )
    rules = StopRules(
        max_new_tokens=case.limit,
        eos_token_ids=case.eos,
        sequences=case.sequences,
        criteria=[lambda tokens: len(tokens) in case.says_yes],
        text=text,
    )
    kept: tuple[int, ...] = ()
    shown = []
    for run in case.runs:
        if rules.finish_reason is not None:
            break
        kept += cut(run, rules)
        shown.append(text.take())
    return End(kept, text.text, rules.finish_reason), shown


class _Runs:
    """A proposer that makes the runs of a case: the true tokens up to the next edge.

    It is its own strategy, for one request.
    """

    def __init__(self, case: Case, *, prompt: int) -> None:
        self._case = case
        self._prompt = prompt
        self.max_nodes = len(case.tokens)

    def new_proposer(self, params: SamplingParams) -> _Runs:
        return self

    def propose(self, committed: Sequence[int], budget: Budget) -> Proposal:
        done = len(committed) - self._prompt
        end = next(end for end in accumulate(map(len, self._case.runs)) if end > done)
        return Proposal(TokenTree.chain(self._case.tokens[done : end - 1]))

    def observe(self, outcome: StepOutcome) -> None:
        """Learn nothing."""


class _Says(ToyAdapter):
    """Says the tokens of a case after any prompt of one token."""

    def __init__(self, case: Case) -> None:
        super().__init__(vocab_size=len(case.pieces), eos=case.eos)
        self._tokens = case.tokens

    def logits_after(self, path: Sequence[int]) -> Tensor:
        logits = super().logits_after(path)
        if len(path) <= len(self._tokens):
            logits[self._tokens[len(path) - 1]] = 9.0
        return logits


def by_decoder(case: Case) -> tuple[End, list[str]]:
    """Return the same by way of a request."""

    def says_yes(input_ids: Tensor, _: object) -> Tensor:
        return torch.tensor([input_ids.shape[1] - 1 in case.says_yes])

    decoder = Decoder(_Says(case), case.tokenizer, strategy=_Runs(case, prompt=1))
    stream = decoder.stream(
        [1],
        max_new_tokens=case.limit,
        stop=list(case.strings),
        stop_token_ids=list(case.sequences),
        stopping_criteria=[says_yes],
    )
    shown = [chunk.text for chunk in stream]
    result = stream.result
    return End(tuple(result.tokens), result.text, result.finish_reason), shown


texts = st.text(alphabet="aab é漢𝄞", max_size=3)
whole_pieces = st.lists(texts.map(str.encode), min_size=4, max_size=6)
byte_pieces = st.lists(
    texts.map(str.encode)
    | st.sampled_from([b"\xc3", b"\xa9", b"\xa9a", b"b\xe6", b"\xbc", b"\xff"]),
    min_size=4,
    max_size=6,
)


@st.composite
def cases(draw: st.DrawFn, pieces: st.SearchStrategy[list[bytes]]) -> Case:
    """Return any case; most of the stops are parts of what the model says, or nearly so."""
    vocabulary = draw(pieces)
    token = st.integers(0, len(vocabulary) - 1)
    tokens = draw(st.lists(token, min_size=1, max_size=14))
    place = st.integers(0, len(tokens) - 1)

    @st.composite
    def part(draw: st.DrawFn) -> tuple[int, ...]:
        start, length = draw(place), draw(st.integers(1, 4))
        return (*tokens[start : start + length], *draw(st.lists(token, max_size=1)))

    said = b"".join(vocabulary[one] for one in tokens).decode("utf-8", "ignore")
    string = st.text(alphabet="ab é漢", min_size=1, max_size=3)
    if said:
        middle = st.integers(0, len(said) - 1)
        string |= st.builds(lambda at, size: said[at : at + size], middle, st.integers(1, 4))
    return Case(
        pieces=tuple(vocabulary),
        tokens=tuple(tokens),
        limit=draw(st.integers(1, len(tokens) + 3)),
        edges=tuple(draw(st.lists(place, max_size=6))),
        eos=frozenset(draw(st.lists(token, max_size=1))),
        sequences=tuple(draw(st.lists(part(), max_size=3))),
        strings=tuple(draw(st.lists(string, max_size=3))),
        says_yes=frozenset(draw(st.lists(place.map(lambda at: at + 1), max_size=1))),
    )


def token_by_token(case: Case) -> Case:
    return replace(case, edges=tuple(range(len(case.tokens))))


def check_stream(case: Case, end: End, shown: list[str]) -> None:
    """Check that what is shown after each run is all that is certain, and in the end the text."""
    ends = list(accumulate(map(len, case.runs)))
    so_far = ""
    for place, piece in enumerate(shown):
        so_far += piece
        assert end.text.startswith(so_far)
        if end.reason is None or place < len(shown) - 1:
            assert so_far == certain(case, ends[place])
    if end.reason is not None:
        assert so_far == end.text


@settings(max_examples=600)
@given(cases(whole_pieces))
def test_a_text_ends_where_the_definition_says_however_it_is_cut_into_runs(case: Case) -> None:
    end, shown = by_rules(case)
    assert end == naive(case)
    check_stream(case, end, shown)


@settings(max_examples=600)
@given(cases(byte_pieces))
def test_so_it_does_where_tokens_are_parts_of_characters(case: Case) -> None:
    if case.sequences:
        # Both could be complete at one token, the sequence from the middle of a character on:
        # then no text is right.
        case = replace(case, strings=())
    end, shown = by_rules(case)
    assert end == naive(case)
    check_stream(case, end, shown)


@settings(max_examples=300)
@given(cases(byte_pieces | whole_pieces))
def test_the_runs_do_not_matter(case: Case) -> None:
    assert by_rules(case)[0] == by_rules(token_by_token(case))[0]


@settings(max_examples=200)
@given(cases(whole_pieces))
def test_a_request_ends_where_the_definition_says(case: Case) -> None:
    case = replace(case, limit=min(case.limit, len(case.tokens)))
    end, shown = by_decoder(case)
    assert end == naive(case)
    check_stream(case, end, shown)
