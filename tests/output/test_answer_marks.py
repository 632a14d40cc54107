"""Marks around a whole answer are the model's, not the answer's, however the reply was divided or cut."""

from __future__ import annotations

import itertools

import pytest

from start_llm.core.events import Content
from start_llm.output.answer_marks import AnswerUnwrapper

PAIRS = (("<answer>\n", "\n</answer>"), ("<answer>", "</answer>"))


def unwrapped(pieces: list[str], *, complete: bool) -> str:
    unwrapper = AnswerUnwrapper(PAIRS)
    events = [event for piece in pieces for event in unwrapper.without([Content(piece)])]
    outputs = [*events, *unwrapper.close(complete)]
    return "".join(event.text for event in outputs if isinstance(event, Content))


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>\nYes.\n</answer>", "Yes."),
        ("<answer>Yes.</answer>", "Yes."),
        ("Yes.", "Yes."),
        ("Write <answer> and </answer>", "Write <answer> and </answer>"),
        ("<answer>", ""),
        ("<answer>\n", ""),
        ("", ""),
    ],
)
def test_marks_around_an_answer_are_left_out(text: str, answer: str, complete: bool):
    assert unwrapped([text], complete=complete) == answer
    for cut in range(len(text)):
        assert unwrapped([text[:cut], text[cut:]], complete=complete) == answer
    assert unwrapped(list(text), complete=complete) == answer


@pytest.mark.parametrize(("text", "answer"), [("<answer>Yes.</ans", "Yes."), ("<answ", "")])
def test_half_a_mark_at_the_end_of_a_cut_reply_is_left_out(text: str, answer: str):
    for first, second in itertools.combinations(range(len(text)), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert unwrapped(pieces, complete=False) == answer
