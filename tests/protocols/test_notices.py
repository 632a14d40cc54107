"""The terminal shows each thing once."""

from start_llm.protocols.notices import Notices


def test_each_thing_is_reported_once():
    reported: list[str] = []
    notices = Notices(reported.append)
    for text in ("a", "b", "a"):
        notices.tell(text)
    assert reported == ["a", "b"]


def test_words_of_clients_move_no_cursor_and_fill_no_terminal():
    lines: list[str] = []
    notices = Notices(lines.append)
    notices.tell("a\x1b[2J\nb")
    for number in range(1000):
        notices.tell(f"{number} " + "x" * 10_000)
    assert lines[0] == "a?[2J?b"
    assert len(lines) == 100
    assert max(map(len, lines)) == 200


def test_without_a_terminal_nothing_is_printed():
    Notices().tell("a")
