"""A bare list of calls at the end of an answer is called only where it can be nothing else."""

import pytest

from start_llm.formats.registry import family_by_name
from start_llm.output.splitter import make_splitter
from tests.output.corpus.case import TOOLS, Case, Outcome, outcome_of, split

LFM2 = family_by_name("lfm2")
CALL = "[read(path='a')]"


def parsed(text: str) -> Outcome:
    case = Case(name="list", text=text, family=LFM2)
    whole = split(case, [text])
    assert split(case, text) == whole
    return outcome_of(whole)


def test_a_list_that_ends_an_answer_is_called():
    outcome = parsed(f"I look. {CALL}\n")
    assert (outcome.calls, outcome.ended, outcome.content) == ([("read", '{"path": "a"}')], 1, "I look.")


@pytest.mark.parametrize("quote", ["`{}`", "```\n{}\n```", '"{}', "'{}"])
def test_a_quoted_list_is_text(quote):
    text = "So: " + quote.format(CALL)
    assert (parsed(text).calls, parsed(text).content) == ([], text)
    assert not parsed(f"So: `{CALL}").calls


def test_a_list_in_front_of_prose_is_text():
    assert parsed(f"See {CALL} for it.").content == f"See {CALL} for it."
    assert parsed(f"So {CALL} and {CALL}").content == f"So {CALL} and {CALL}"


def test_text_waits_for_no_longer_than_it_may_be_a_list():
    splitter = make_splitter(LFM2, TOOLS, reasoning_is_open=False, thinking=True)
    fed = [bool(splitter.feed(piece)) for piece in ("A [re", "ad](b) ", "[read(path=", "'a')", "]", ".")]
    assert fed == [True, True, False, False, False, True]
