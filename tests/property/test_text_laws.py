"""Incremental text against decoding everything at once, over random texts, splits and stops."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from decodekit.engine.detokenizer import IncrementalText
from tests.support.fakes import ByteTokenizer, PieceTokenizer

BROKEN = "\ufffd"
texts = st.text(alphabet="ab \né漢𝄞", max_size=24)
stops = st.lists(st.text(alphabet="ab \né漢", min_size=1, max_size=4), max_size=3)


@st.composite
def splits(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Cut bytes into tokens anywhere, also inside characters; some tokens are empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data) + 2)))
    edges = [0, *cuts, len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def held(text: str, stop: list[str]) -> int:
    """Return the length of the longest end of ``text`` that is the beginning of a stop string."""
    heads = {string[:end] for string in stop for end in range(1, len(string))}
    return max((len(head) for head in heads if text.endswith(head)), default=0)


def cut(text: str, stop: list[str]) -> str:
    """Return ``text`` before the first stop string in it."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


@given(texts, stops, st.data())
def test_text_is_certain_unbroken_and_cut_at_the_first_stop(
    full: str, stop: list[str], data: st.DataObject
) -> None:
    pieces = data.draw(splits(full.encode()))
    tokenizer = ByteTokenizer(pieces)
    text = IncrementalText(tokenizer, stop=stop)
    shown = ""
    for count in range(1, len(pieces) + 1):
        stopped = text.push(count - 1)
        shown += text.take()
        whole = tokenizer.decode(range(count))
        if stopped:
            # It had to end, and not a token earlier.
            assert cut(whole, stop) != whole
            assert text.text == cut(whole, stop)
            break
        assert BROKEN not in shown
        if not whole.endswith(BROKEN):
            assert cut(whole, stop) == whole
            assert text.text == whole
            assert shown == whole[: len(whole) - held(whole, stop)]  # no less and no more
    text.finish()
    shown += text.take()
    assert shown == text.text
    if not text.stopped:
        assert text.text == full


@given(st.binary(max_size=14), st.data())
def test_broken_bytes_come_out_as_if_decoded_at_once(raw: bytes, data: st.DataObject) -> None:
    pieces = data.draw(splits(raw))
    text = IncrementalText(ByteTokenizer(pieces))
    shown = ""
    for token in range(len(pieces)):
        text.push(token)
        shown += text.take()
    text.finish()
    assert shown + text.take() == text.text == raw.decode("utf-8", "replace")


@given(st.lists(st.sampled_from(b"a\x80\xe2\x82\xac\xf0\x9f\x8e\x88"), max_size=45))
def test_so_do_long_runs_of_single_bytes_and_none_waits_for_long(raw: list[int]) -> None:
    text = IncrementalText(ByteTokenizer([bytes([byte]) for byte in raw]))
    shown = ""
    for count in range(1, len(raw) + 1):
        text.push(count - 1)
        shown += text.take()
        assert len(shown) >= len(bytes(raw[:count]).decode("utf-8", "replace")) - 16
    text.finish()
    assert shown + text.take() == text.text == bytes(raw).decode("utf-8", "replace")


@given(st.text(alphabet="a\ufffd漢", max_size=12), st.data())
def test_replacement_characters_of_the_text_itself_stay(full: str, data: st.DataObject) -> None:
    pieces = data.draw(splits(full.encode()))
    text = IncrementalText(ByteTokenizer(pieces))
    for token in range(len(pieces)):
        text.push(token)
    text.finish()
    assert text.take() == full


EMOJI = tuple(f"<0x{byte:02X}>" for byte in "😀".encode())
ACCENT = tuple(f"<0x{byte:02X}>" for byte in "é".encode())
PIECES = ["▁the", "▁", "the", "漢", "s", *EMOJI, *ACCENT]
words = st.sampled_from([(0,), (1,), (2,), (3,), (4,), (5, 6, 7, 8), (9, 10)])
runs = st.lists(words, max_size=12).map(lambda parts: [t for part in parts for t in part])


@given(runs, runs)
def test_spaces_are_those_of_decoding_context_and_answer_together(
    context: list[int], answer: list[int]
) -> None:
    tokenizer = PieceTokenizer(PIECES)
    text = IncrementalText(tokenizer, context=context)
    shown = ""
    for token in answer:
        text.push(token)
        shown += text.take()
        assert BROKEN not in shown
    text.finish()
    before = tokenizer.decode(context)
    assert shown + text.take() == text.text == tokenizer.decode([*context, *answer])[len(before) :]
