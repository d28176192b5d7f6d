"""Text from tokens by example; ``tests/property/test_text_laws.py`` has the laws."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from decodekit.engine.detokenizer import IncrementalText, Tokenizer
from decodekit.errors import ConfigError
from tests.support.fakes import ByteTokenizer, PieceTokenizer


def feed(text: IncrementalText, tokens: Sequence[int], *, finish: bool = True) -> list[str]:
    """Push tokens until a stop string is complete; return what ``take`` gave after each."""
    pieces = []
    for token in tokens:
        stopped = text.push(token)
        assert stopped is text.stopped
        pieces.append(text.take())
        if stopped:
            return pieces
    if finish:
        text.finish()
        pieces.append(text.take())
    return pieces


def byte_text(pieces: Sequence[bytes], **options: object) -> tuple[IncrementalText, range]:
    tokenizer: Tokenizer = ByteTokenizer(pieces)
    return IncrementalText(tokenizer, **options), range(len(pieces))  # type: ignore[arg-type]


def test_whole_characters_are_shown_at_once() -> None:
    text, tokens = byte_text([b"The", b" cat", "é".encode()])
    assert feed(text, tokens) == ["The", " cat", "é", ""]
    assert text.text == "The caté"


@pytest.mark.parametrize("character", ["é", "€", "𝄞", "漢"])
def test_a_character_waits_for_all_its_bytes(character: str) -> None:
    pieces = [b"a", *(bytes([byte]) for byte in character.encode()), b"b"]
    text, tokens = byte_text(pieces)
    waiting = [""] * (len(pieces) - 3)
    assert feed(text, tokens) == ["a", *waiting, character, "b", ""]


def test_a_token_may_hold_the_end_of_one_character_and_the_start_of_the_next() -> None:
    text, tokens = byte_text([b"\xe6\xbc", b"\xa2\xe5\xad", b"\x97."])
    feed(text, tokens)
    assert text.text == "漢字."


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    text, tokens = byte_text([b"a", b"\xe2\x82"])
    assert feed(text, tokens) == ["a", "", "\ufffd"]


def test_broken_bytes_are_shown_once_something_whole_follows() -> None:
    text, tokens = byte_text([b"a", b"\xe2\x82", b"b"])
    assert feed(text, tokens) == ["a", "", "\ufffdb", ""]


def test_a_replacement_character_in_the_text_itself_is_kept() -> None:
    text, tokens = byte_text([b"a", "\ufffd".encode(), b"b", "\ufffd\ufffd".encode()])
    assert "".join(feed(text, tokens)) == text.text == "a\ufffdb\ufffd\ufffd"


def test_replacement_characters_without_end_do_not_wait_for_ever() -> None:
    text, tokens = byte_text(["\ufffd".encode()] * 40)
    pieces = feed(text, tokens, finish=False)
    assert sum(map(len, pieces)) >= 40 - 16
    text.finish()
    assert "".join(pieces) + text.take() == "\ufffd" * 40


@pytest.mark.parametrize("stray", range(12, 24))
def test_a_character_is_whole_after_any_number_of_stray_bytes(stray: int) -> None:
    text, tokens = byte_text([b"\x80"] * stray + [b"\xe2", b"\x82", b"\xac", b"!"])
    feed(text, tokens)
    assert text.text == "\ufffd" * stray + "€!"


@pytest.mark.parametrize("stray", range(8, 20))
def test_a_character_is_not_cut_where_stray_bytes_are_given_up(stray: int) -> None:
    """Tokens that end one character and begin the next never end on a whole one."""
    parts = [b"\xf0", b"\x9f", b"\x8e", b"\x88\xe2", b"\x82", b"\xac\xf0", b"\x9f\x8e\x88"]
    text, tokens = byte_text([b"\x80"] * stray + parts)
    feed(text, tokens)
    assert text.text == "\ufffd" * stray + "🎈€🎈"


def test_special_tokens_add_no_text() -> None:
    tokenizer = ByteTokenizer([b"a", b"</s>", b"b"], special=[1])
    text = IncrementalText(tokenizer)
    assert feed(text, [1, 0, 1, 1, 2, 1]) == ["", "a", "", "", "b", "", ""]


def test_a_tokenizer_that_drops_the_first_space_keeps_it_between_tokens() -> None:
    tokenizer = PieceTokenizer(["▁Hello", "▁world", "▁", "!", "ly"])
    text = IncrementalText(tokenizer)
    assert feed(text, [0, 1, 4, 2, 2, 3]) == ["Hello", " world", "ly", " ", " ", "!", ""]


def test_the_first_space_is_kept_after_a_context() -> None:
    tokenizer = PieceTokenizer(["▁Hello", "▁world", "▁"])
    text = IncrementalText(tokenizer, context=[0])
    assert feed(text, [1, 2, 0]) == [" world", " ", " Hello", ""]
    text = IncrementalText(tokenizer, context=[])
    assert feed(text, [1, 2, 0]) == ["world", " ", " Hello", ""]


def test_byte_pieces_of_several_characters_in_a_row() -> None:
    emoji = [f"<0x{byte:02X}>" for byte in "😀é😀".encode()]
    text = IncrementalText(PieceTokenizer([*emoji, "▁a"]))
    pieces = feed(text, range(len(emoji) + 1))
    assert [piece for piece in pieces if piece] == ["😀", "é", "😀", " a"]


@pytest.mark.parametrize("pieces", [[b"do", b" ", b".", b" x"], [b"do", b" n", b"'t", b" x"]])
def test_a_tokenizer_that_cleans_up_spaces_loses_no_character(pieces: list[bytes]) -> None:
    tokenizer = ByteTokenizer(pieces, clean_up=True)
    text = IncrementalText(tokenizer)
    assert "".join(feed(text, range(4))) == text.text
    assert text.text.replace(" ", "") == b"".join(pieces).decode().replace(" ", "")


def test_a_stop_string_inside_a_token_cuts_the_text_before_it() -> None:
    text, tokens = byte_text([b"one", b" two END three", b" four"], stop=["END"])
    assert feed(text, tokens) == ["one", " two "]
    assert text.stopped
    assert text.text == "one two "


def test_a_stop_string_over_several_tokens() -> None:
    text, tokens = byte_text([b"a E", b"N", b"D b"], stop=["END"])
    assert feed(text, tokens) == ["a ", "", ""]
    assert text.text == "a "


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not() -> None:
    text, tokens = byte_text([b"a E", b"N", b"V", b"E", b"!"], stop=["END"])
    assert feed(text, tokens) == ["a ", "", "ENV", "", "E!", ""]
    assert not text.stopped


def test_what_is_held_back_is_shown_at_the_end() -> None:
    text, tokens = byte_text([b"a E", b"N"], stop=["END"])
    assert feed(text, tokens) == ["a ", "", "EN"]


def test_a_stop_string_that_begins_like_itself() -> None:
    text, tokens = byte_text([b"aab", b"aab", b"aac"], stop=["aabaac"])
    assert feed(text, tokens) == ["", "aab", ""]
    assert text.text == "aab"


def test_the_stop_string_that_begins_first_wins() -> None:
    text, tokens = byte_text([b"x", b"abc"], stop=["c", "bc"])
    assert feed(text, tokens) == ["x", "a"]


def test_a_short_stop_string_inside_a_longer_one_ends_the_text_first() -> None:
    text, tokens = byte_text([b"a", b"b", b"c"], stop=["abc", "b"])
    assert feed(text, tokens) == ["", "a"]
    assert text.text == "a"


def test_a_stop_string_of_split_characters() -> None:
    stop = "\n漢"
    text, tokens = byte_text([b"a\n\xe6", b"\xbc", b"\xa2 b"], stop=[stop])
    assert "".join(feed(text, tokens)) == text.text == "a"
    assert text.stopped


def test_a_stop_string_right_at_the_start_leaves_no_text() -> None:
    text, tokens = byte_text([b"END"], stop=["END"])
    assert feed(text, tokens) == [""]
    assert text.text == ""


def test_a_stop_string_is_not_looked_for_in_the_context() -> None:
    tokenizer = ByteTokenizer([b"EN", b"D", b"x"])
    text = IncrementalText(tokenizer, stop=["END"], context=[0])
    assert feed(text, [1, 2]) == ["D", "x", ""]


def test_take_twice_gives_nothing_new() -> None:
    text, _ = byte_text([b"abc"])
    text.push(0)
    assert (text.take(), text.take()) == ("abc", "")


def test_no_tokens_no_text() -> None:
    text, _ = byte_text([], stop=["END"])
    assert text.take() == ""
    text.finish()
    assert text.take() == text.text == ""
    assert not text.stopped


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(ConfigError, match="must not be empty") as caught:
        IncrementalText(ByteTokenizer([]), stop=stop)
    assert caught.value.key == "stop"
    assert caught.value.value == stop


class Marked(ByteTokenizer):
    """A tokenizer that names its special tokens, as those of transformers do."""

    @property
    def added_tokens_decoder(self) -> dict[int, str]:
        return {token: self.pieces[token].decode() for token in self.special}


def first_cut(text: str, marked: str, places: list[int], stop: Sequence[str]) -> int | None:
    """Return where the first stop string begins, as a place of ``text``.

    ``places`` are those of the characters of ``marked``, the text with special tokens, in ``text``.
    """
    cuts = [text.find(s) for s in stop if "<" not in s]
    cuts += [places[marked.find(s)] for s in stop if "<" in s and s in marked]
    return min((cut for cut in cuts if cut >= 0), default=None)


@pytest.mark.parametrize("seed", range(60))
def test_stop_strings_with_special_tokens_end_random_texts_where_they_should(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = Marked([b"a", b"b", b"ab", b"\n", b"<e>", b"<p>"], special=[4, 5])
    parts = ["a", "b", "\n", "<e>"]
    stop = ["".join(rng.choices(parts, k=rng.randint(1, 3))) for _ in range(2)]
    text = IncrementalText(tokenizer, stop=stop)
    tokens: list[int] = []
    shown = ""
    for token in rng.choices(range(6), weights=[3, 3, 1, 2, 3, 1], k=14):
        tokens.append(token)
        stopped = text.push(token)
        shown += text.take()
        plain = marked = ""
        places = []
        for one in tokens:
            piece = tokenizer.pieces[one].decode()
            special = one in tokenizer.special
            if not special or (any("<e>" in s for s in stop) and one == 4):
                places += [len(plain) + (0 if special else i) for i in range(len(piece))]
                marked += piece
            plain += "" if special else piece
        cut = first_cut(plain, marked, places, stop)
        assert stopped is (cut is not None)
        if stopped:
            assert text.text == shown == plain[:cut]
            return
        assert plain.startswith(shown)
        assert text.text == plain


@pytest.mark.parametrize(
    ("stop", "pushed", "expected"),
    [
        ("a<i>", [0, 1, 3], None),  # the text so far is "a\ufffd<i>"
        ("<i><i>", [3, 1, 3], None),
        ("a<i>", [0, 3], ""),
        ("<i><i>", [0, 1, 3, 3], "a\ufffd"),
        ("\ufffd<i>", [0, 1, 3], "a"),
    ],
)
def test_bytes_that_wait_stand_before_a_special_token(
    stop: str, pushed: list[int], expected: str | None
) -> None:
    tokenizer = Marked([b"a", b"\xc3", b"\xa9", b"<i>"], special=[3])
    text = IncrementalText(tokenizer, stop=[stop])
    ends = [text.push(token) for token in pushed]
    assert ends == [False] * (len(pushed) - 1) + [expected is not None]
    if expected is None:
        assert not text.push(2)
        expected = tokenizer.decode([*pushed, 2], skip_special_tokens=True)
    assert text.text == expected


def test_special_tokens_in_a_row_are_not_decoded_again_and_again() -> None:
    tokenizer = ByteTokenizer([b"a", b"<e>", b"\xc3"], special=[1])
    lengths: list[int] = []
    decode = tokenizer.decode

    def counted(token_ids: Sequence[int], **options: bool) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids, **options)

    tokenizer.decode = counted  # type: ignore[method-assign, assignment]
    text = IncrementalText(tokenizer, undo=4)
    for token in [0, 2, *[1] * 50, 0]:
        text.push(token)
    assert text.text == "a\ufffda"
    assert max(lengths) < 5
