"""The picture of the terminal: what was written to it is what is drawn."""

from __future__ import annotations

from scripts.terminal_pictures import COLUMNS, drawn, replayed


def test_what_was_erased_is_not_shown():
    written = "first\r\nold table\r\nits end\r\n\r\x1b[2A\x1b[Jsecond\r\n\x1b[2mnew table\x1b[0m\r\n"
    assert replayed(written) == ["first", "second", "\x1b[2mnew table\x1b[0m", ""]


def test_a_picture_has_the_words_in_their_colours_and_fetches_nothing():
    picture = drawn(["\x1b[32m7 cached\x1b[0m", "x" * (COLUMNS - 1)], "start_llm")
    assert "7&#160;cached" in picture
    assert "#98a84b" in picture, "green"
    assert "url(http" not in picture
    assert "@font-face" not in picture
