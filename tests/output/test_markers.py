"""Marks in text that comes in pieces."""

import pytest

from start_llm.core.markers import first_marker, longest_beginning

MARKS = ("<end>", "<end><next>", "<other>")


@pytest.mark.parametrize("text", ["a<end>", "a<end><", "a<end><nex"])
def test_a_mark_that_may_become_a_longer_one_waits_and_is_held_back_whole(text: str):
    assert first_marker(text, MARKS) is None
    assert longest_beginning(text, MARKS) == len(text) - 1


@pytest.mark.parametrize(
    ("text", "mark"), [("a<end>b", "<end>"), ("a<end><next>", "<end><next>"), ("a<other>", "<other>")]
)
def test_a_mark_that_can_become_no_other_is_found(text: str, mark: str):
    assert first_marker(text, MARKS) == (1, mark)


def test_at_the_end_of_the_text_the_shorter_mark_counts():
    assert first_marker("a<end><nex", MARKS, goes_on=False) == (1, "<end>")
