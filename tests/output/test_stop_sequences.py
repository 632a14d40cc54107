"""Stop strings are found however the text is cut, and never reach the client."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.output.stream import StopMatch, StopSequenceMatcher

# Few letters, so that stops overlap each other and themselves.
texts = st.text("ab–", max_size=40)
some_stops = st.lists(st.text("ab–", min_size=1, max_size=5), max_size=4).map(tuple)


@st.composite
def pieces_of_text(draw: st.DrawFn) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def scan(stops: Sequence[str], pieces: Iterable[str]) -> StopMatch:
    """Everything that a scanner lets through, and the stop that it found."""
    scanner = StopSequenceMatcher(stops)
    sent = ""
    for piece in pieces:
        result = scanner.feed(piece)
        sent += result.text
        if result.stop is not None:
            assert scanner.close() == ""
            return StopMatch(sent, result.stop)
    return StopMatch(sent + scanner.close())


def expected(stops: Sequence[str], text: str) -> StopMatch:
    """By looking at one character more at a time: the first stop to be complete, the longest of several."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return StopMatch(text[: end - len(stop)], stop)
    return StopMatch(text)


@given(some_stops, pieces_of_text())
def test_any_chunking_finds_the_stop_that_completes_first(stops, pieces):
    assert scan(stops, pieces) == expected(stops, "".join(pieces))


@given(some_stops, pieces_of_text())
def test_what_was_sent_before_a_stop_never_holds_a_part_of_it(stops, pieces):
    scanner = StopSequenceMatcher(stops)
    sent = ""
    for piece in pieces:
        result = scanner.feed(piece)
        sent += result.text
        assert not any(stop in sent for stop in stops)
        if result.stop is not None:
            return


@given(some_stops, pieces_of_text())
def test_nothing_is_held_back_that_cannot_begin_a_stop(stops, pieces):
    scanner = StopSequenceMatcher(stops)
    for piece in pieces:
        if scanner.feed(piece).stop is not None:
            return
    held = scanner.close()
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(pieces_of_text())
def test_without_stops_every_piece_passes_at_once(pieces):
    scanner = StopSequenceMatcher(())
    assert [scanner.feed(piece).text for piece in pieces] == pieces
    assert scanner.close() == ""


@pytest.mark.parametrize(
    ("stops", "text", "result"),
    [
        (["END"], "so far END and on", StopMatch("so far ", "END")),
        (["bcd", "c"], "abcd", StopMatch("ab", "c")),
        (["c", "abc"], "abc", StopMatch("", "abc")),
        (["aab"], "aaaab", StopMatch("aa", "aab")),
        (["\n\n"], "one\ntwo\n\nthree", StopMatch("one\ntwo", "\n\n")),
        (["日本"], "今日は日本", StopMatch("今日は", "日本")),
        (["stop"], "sto", StopMatch("sto")),
    ],
)
def test_known_cases_come_out_the_same_whole_and_letter_by_letter(stops, text, result):
    assert scan(stops, [text]) == scan(stops, text) == result
