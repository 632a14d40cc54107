"""What is left of a call behind its end is dropped, and what is an answer is reported."""

import json

import pytest

from start_llm.formats.model_format import Notation
from start_llm.formats.registry import NOTATIONS
from start_llm.formats.writing.call_text import CallText
from start_llm.output.splitter import make_splitter
from tests.output.corpus.case import TOOLS, Case, Outcome, outcome_of, split
from tests.output.corpus.writers import WRITERS

CLOSED = sorted(name for name in WRITERS if name in NOTATIONS and NOTATIONS[name].closers)

LISTS = ("apriel", "functools", "granite", "lfm2", "mistral_list", "pythonic", "xlam")
"""Those that end in a bracket, behind which a mark may be missing."""


def parsed(name: str, text: str, *, complete: bool = True) -> Outcome:
    case = Case(name="remains", text=text, family=WRITERS[name].family, complete=complete)
    whole = split(case, [text])
    assert split(case, text) == whole
    return outcome_of(whole)


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("before", ["", "\n", " ", "}\n", "\n]"])
def test_the_end_of_a_call_once_more_is_no_text(name, before):
    call, end = WRITERS[name].call("read", path="a"), NOTATIONS[name].closers[-1]
    outcome = parsed(name, f"{call}{before}{end}\n\nDone.")
    assert [(tool, json.loads(given)) for tool, given in outcome.closed_calls] == [("read", {"path": "a"})]
    assert outcome.content == "Done."


@pytest.mark.parametrize("written", ["</call>", "<</call>>", "<|end|>", "<</call>>\n<|calls|>"])
def test_a_mark_that_ends_a_call_is_taken_whole(written):
    text = CallText(mark="<<call ", head="<<call NAME>>", tail=written)
    notation = Notation(name="any", openers=("<<call ",), reader=NOTATIONS[CLOSED[0]].reader, text=text)
    assert notation.closers == tuple(written.split())


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("text", ["} is a brace", ', "so" it is', "Done."])
def test_an_answer_behind_a_call_is_reported(name, text):
    outcome = parsed(name, f"{WRITERS[name].call('read', path='a')}\n\n{text}")
    assert outcome.ended == 1
    assert outcome.content == text


@pytest.mark.sample(54)
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_of_a_call_that_the_limit_cuts_behind_a_whole_one_nothing_is_shown(name):
    call, other = WRITERS[name].call("read", path="a"), WRITERS[name].call("write", path="b", text="so it is")
    if WRITERS[name].starts_reply:
        return
    for end in range(3, len(other) - 1):
        outcome = parsed(name, f"{call}\n{other[:end]}", complete=False)
        assert outcome.content == "", other[:end]
        assert outcome.ended in (1, 2)


@pytest.mark.parametrize("junk", [', "junk"', ", 5", " , junk"])
@pytest.mark.parametrize("name", LISTS)
def test_what_is_no_call_at_the_end_of_a_list_is_dropped(name, junk):
    call = WRITERS[name].call("read", path="a")
    end = call.rindex("]")
    outcome = parsed(name, f"{call[:end]}{junk}]")
    assert [(tool, json.loads(given)) for tool, given in outcome.closed_calls] == [("read", {"path": "a"})]
    assert outcome.content == ""
    splitter = make_splitter(WRITERS[name].family, TOOLS, reasoning_is_open=False, thinking=True)
    splitter.feed(f"{call[:end]}{junk}]")
    splitter.close(complete=True)
    assert splitter.was_repaired


@pytest.mark.parametrize("name", CLOSED)
def test_the_tokens_of_a_reply_with_remains_are_not_recorded(name):
    splitter = make_splitter(WRITERS[name].family, TOOLS, reasoning_is_open=False, thinking=True)
    splitter.feed(WRITERS[name].call("list") + NOTATIONS[name].closers[-1])
    splitter.close(complete=True)
    assert splitter.was_repaired
