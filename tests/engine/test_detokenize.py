"""Bytes of tokens become text: whole characters only, and every byte counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.engine.detokenize import Detokenizer


@st.composite
def cut(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes of tokens, cut anywhere."""
    data = draw(whole)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def pieces(tokens: list[bytes], **options: bool) -> list[str]:
    """Return the text that each token adds, and at last the text that closing adds."""
    detokenizer = Detokenizer(tokens.__getitem__, **options)
    return [*(detokenizer.feed(token) for token in range(len(tokens))), detokenizer.close()]


@pytest.mark.long
@given(cut(st.text(max_size=20).map(str.encode)))
def test_text_comes_back_however_its_bytes_are_cut(tokens):
    assert "".join(pieces(tokens)) == b"".join(tokens).decode()


@given(cut(st.binary(max_size=20)))
def test_bytes_that_are_no_text_become_replacement_characters(tokens):
    assert "".join(pieces(tokens)) == b"".join(tokens).decode(errors="replace")


@pytest.mark.thorough
@given(cut(st.text(max_size=20).map(str.encode)))
def test_no_piece_holds_a_part_of_a_character(tokens):
    texts = pieces(tokens)
    assert not any("\ufffd" in piece for piece in texts if "\ufffd" not in b"".join(tokens).decode())
    assert texts[-1] == ""


def test_a_character_comes_with_its_last_byte():
    fish = "🐟".encode()
    assert pieces([b"a" + fish[:1], fish[1:3], fish[3:] + b"b"]) == ["a", "", "🐟b", ""]


def test_an_unfinished_character_is_sent_at_the_end():
    assert pieces([b"a", "é".encode()[:1]]) == ["a", "", "\ufffd"]


def test_a_broken_character_does_not_swallow_what_follows():
    assert "".join(pieces([b"\xf0\x9f", b"ok"])) == "\ufffdok"


def test_a_leading_space_stays():
    assert "".join(pieces([b" hello", b" you"])) == " hello you"


def test_the_space_that_marks_the_start_is_dropped_once():
    assert "".join(pieces([b" hello", b" you"], trims_leading_space=True)) == "hello you"
    assert "".join(pieces([b"", b" ", b" hello"], trims_leading_space=True)) == " hello"
    assert "".join(pieces([b"hello", b" you"], trims_leading_space=True)) == "hello you"


def test_a_token_without_bytes_adds_nothing():
    assert pieces([b"a", b"", b"b"]) == ["a", "", "b", ""]
