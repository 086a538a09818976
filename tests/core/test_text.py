"""TextStream: pieces concatenate to the decoded whole, and stop strings are found wherever tokens split them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, strategies as st

from outpace.core.errors import LONGEST, BadInput, shortened
from outpace.core.text import TextStream, check_text
from support import BYTES, Pieces

if TYPE_CHECKING:
    from outpace.model import Model

TEXT = st.text(alphabet="ab é€😀\n�", max_size=12)
STOPS = st.lists(st.text(alphabet="ab é€", min_size=1, max_size=4), max_size=3)


@st.composite
def split_text(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text and its UTF-8 bytes cut at random, also within characters."""
    text = draw(TEXT)
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)))))
    return text, [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def run(pieces: list[bytes], stops: list[str]) -> tuple[list[str], TextStream]:
    """Push pieces as tokens until a stop is found; what was released, and the stream."""
    stream = TextStream(Pieces(pieces), stops)
    out = []
    for token in range(len(pieces)):
        out.append(stream.push(token))
        if stream.stopped is not None:
            break
    out.append(stream.finish())
    assert "".join(out) == stream.text
    return out, stream


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: reading character by character, the first stop that is complete; the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes_read_as_the_whole_does(tokens: list[int]) -> None:
    stream = TextStream(BYTES)
    pieces = [stream.push(token) for token in tokens]
    pieces.append(stream.finish())
    assert "".join(pieces) == BYTES.decode(tokens) == stream.text
    assert stream.finish() == ""


@given(split_text())
def test_characters_are_released_whole_and_as_soon_as_they_are_complete(case: tuple[str, list[bytes]]) -> None:
    text, pieces = case
    out, stream = run(pieces, [])
    assert stream.text == text
    if "�" not in text:
        assert all("�" not in piece for piece in out)
        assert out[-1] == ""


@given(split_text(), STOPS)
@example(("a€", [b"a", b"\xe2\x82"]), ["€"])
@example(("aab", [b"aa", b"b"]), ["ab"])
@example(("abcd", [b"abcd"]), ["abcd", "bc"])
@example(("abcé", [b"abc", b"\xc3", b"\xa9"]), ["abcd", "c"])
def test_stop_strings_do_not_depend_on_how_tokens_split_the_text(
    case: tuple[str, list[bytes]], stops: list[str]
) -> None:
    text = b"".join(case[1]).decode("utf-8", errors="replace")
    expected, stop = cut(text, stops)
    _, stream = run(case[1], stops)
    assert (stream.text, stream.stopped) == (expected, stop)


@pytest.mark.parametrize("stop", ["STOP", "éé", "\n\n", "aab", "😀"])
def test_a_stop_string_split_at_every_position(stop: str) -> None:
    data = f"be{stop}after".encode()
    for first in range(1, len(data)):
        for second in range(first, len(data)):
            pieces = [piece for piece in (data[:first], data[first:second], data[second:]) if piece]
            _, stream = run(pieces, [stop])
            assert (stream.text, stream.stopped) == ("be", stop), pieces


def test_what_may_begin_a_stop_string_is_held_and_released_when_it_does_not() -> None:
    stream = TextStream(BYTES, ["aab"])
    pushed = [stream.push(ord(letter)) for letter in "xaaaaab"]
    assert pushed == ["x", "", "", "a", "a", "a", ""]
    assert (stream.text, stream.stopped) == ("xaaa", "aab")
    stream = TextStream(BYTES, ["END"])
    assert [stream.push(ord(letter)) for letter in "aEN"] == ["a", "", ""]
    assert stream.finish() == "EN"
    assert (stream.text, stream.stopped) == ("aEN", None)


def test_of_several_stops_the_earliest_wins() -> None:
    """One token holding several, or one character a token: the same."""
    for pieces in ([b"one two three"], [bytes([value]) for value in b"one two three"]):
        for stops in (["three", "two", "tw"], ["tw", "two", "three"]):
            _, stream = run(pieces, stops)
            assert (stream.text, stream.stopped) == ("one ", "tw")
    for pieces in ([b"abcd"], [b"a", b"b", b"c", b"d"], [b"ab", b"cd"]):
        _, stream = run(pieces, ["abcd", "bc"])
        assert (stream.text, stream.stopped) == ("a", "bc")
        _, stream = run(pieces, ["bc", "abc"])
        assert (stream.text, stream.stopped) == ("", "abc")


def test_a_stop_before_an_unfinished_character_is_seen_at_the_end() -> None:
    _, stream = run([b"hello STOP\xf0\x9f"], ["STOP"])
    assert (stream.text, stream.stopped) == ("hello ", "STOP")


def test_special_tokens_without_text_release_nothing_and_break_nothing() -> None:
    tokenizer = Pieces([b"a", None, b"\xe2\x82", b"\xac", b"b"])
    stream = TextStream(tokenizer, ["ab"])
    assert [stream.push(token) for token in (1, 2, 1, 3, 1, 1, 0, 1, 4)] == ["", "", "", "€", "", "", "", "", ""]
    assert (stream.text, stream.stopped) == ("€", "ab")


def test_a_tokenizer_that_strips_the_leading_space() -> None:
    """As sentencepiece does: the first token of what is decoded loses its space."""

    class Stripping(Pieces):
        def decode(self, ids: object) -> str:
            return super().decode(ids).removeprefix(" ")  # type: ignore[arg-type]

    tokenizer = Stripping([b" once", b" upon", b" a", b"time", b"\xe2\x82", b"\xac"])
    tokens = [0, 1, 2, 3, 4, 5, 2, 2, 0]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) == tokenizer.decode(tokens) == "once upon atime€ a a once"


@pytest.mark.model
def test_the_real_tokenizer(smollm2: Model) -> None:
    tokenizer = smollm2.tokenizer
    text = "Größe 😀👩‍👩‍👧 naïve — 数学 is  fun,\n\tisn't it? don ' t . Ünïcödé 🇩🇪 <x>"
    for tokens in (tokenizer.encode(text), [*range(3, 40_000, 517)], [*range(40_000, 3, -419)]):
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in tokens]
        pieces.append(stream.finish())
        assert "".join(pieces) == tokenizer.decode(tokens) == stream.text
    for stop in ("naïve", "fun,\n", "🇩🇪", "👩‍👧"):
        stream = TextStream(tokenizer, [stop])
        for token in tokenizer.encode(text):
            stream.push(token)
            if stream.stopped:
                break
        stream.finish()
        assert stream.text == text[: text.index(stop)]


@given(st.text(alphabet="abc \n\t", max_size=60), st.integers(8, 30))
def test_what_is_shortened_ends_after_a_whole_word(text: str, longest: int) -> None:
    found = shortened(text, longest)
    words = text.split()
    kept = found.removesuffix(" ...").split()
    assert kept == words[: len(kept)] or (len(kept) == 1 and words[0].startswith(kept[0]))
    assert len(found) <= longest
    assert (kept == words) == (" ".join(words) == found)


def test_a_megabyte_is_shortened_at_once() -> None:
    """A grammar's error may repeat all of it: word by word the time grew with its square."""
    assert shortened("a " * (1 << 19)) == "a " * (LONGEST // 2 - 2) + "..."


def test_short_messages_stay_whole() -> None:
    lines = "Validation error for field 'hidden_size':\n    TypeError: expected int, got str\n"
    assert shortened(lines) == "Validation error for field 'hidden_size': TypeError: expected int, got str"
    assert shortened("x" * LONGEST) == "x" * LONGEST
    assert shortened("x" * 2 * LONGEST) == "x" * (LONGEST - 4) + " ..."


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    check_text("naïve 🙂", "it")
    with pytest.raises(BadInput, match=r"^it is not valid text: character 3 is half of a surrogate pair \(U\+D83D\)"):
        check_text("ab\ud83d", "it")
