"""A reply is split into thought, answer and calls as the corpus says, however its text is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import Content, Reasoning
from start_llm.output.splitter import PlainSplitter, make_splitter
from tests.output.corpus import CORPUS
from tests.output.corpus.case import NO_TOOLS, TOOLS, Case, outcome_of, split
from tests.output.replies import FAMILIES, noise, noisy_cases, pieces_of

SHORT = 150
"""Texts up to this length are cut at every place, longer ones at some."""


def cuts(text: str) -> range:
    return range(1, len(text), 1 if len(text) <= SHORT else max(1, len(text) // 25))


@pytest.mark.parametrize("name", CORPUS)
def test_a_reply_means_what_the_corpus_says_however_it_is_cut(name):
    case = CORPUS[name]
    whole = split(case, [case.text])
    said = outcome_of(whole)
    assert said.reasoning == case.reasoning
    assert said.content == case.content
    assert [(tool, json.loads(arguments)) for tool, arguments in said.closed_calls] == [
        (call.name, call.arguments) for call in case.calls
    ]
    assert said.open_call == case.open_call
    for call, (_, arguments) in zip(case.calls, said.closed_calls, strict=True):
        assert call.raw in (None, arguments)
    assert split(case, case.text) == whole
    for cut in cuts(case.text):
        assert split(case, [case.text[:cut], case.text[cut:]]) == whole


@pytest.mark.parametrize("name", [name for name in CORPUS if ": value" not in name])
def test_a_reply_that_ends_anywhere_keeps_what_it_has_said(name):
    case = CORPUS[name]
    whole = outcome_of(split(case, [case.text], complete=False))
    for cut in cuts(case.text):
        text = case.text[:cut]
        said = outcome_of(split(case, [text], complete=False))
        assert said.closed_calls == whole.closed_calls[: said.ended]
        if said.open_call:
            tool, arguments = said.open_call
            assert whole.calls[said.ended][0] == tool
            assert whole.calls[said.ended][1].startswith(arguments)
        assert is_beginning_and_tail(said.reasoning, whole.reasoning, text)
        assert is_beginning_and_tail(said.content, whole.content, text)


def is_beginning_and_tail(said: str, whole: str, text: str) -> bool:
    """Whether this is what the whole reply begins with, then what was held back at the cut."""
    same = next(
        (i for i, (a, b) in enumerate(zip(said, whole, strict=False)) if a != b), min(len(said), len(whole))
    )
    return any(text.endswith(said[i:].lstrip()) for i in range(same, -1, -1))


@given(st.data(), noisy_cases())
def test_no_text_raises_and_how_it_was_cut_changes_nothing(data, case):
    whole = split(case, [case.text])
    assert split(case, data.draw(pieces_of(case.text))) == whole
    assert split(case, case.text) == whole


@given(noisy_cases())
def test_what_comes_out_can_always_be_sent(case):
    said = outcome_of(split(case, [case.text]))
    for tool, arguments in said.closed_calls:
        assert tool in TOOLS
        assert isinstance(json.loads(arguments), dict)
    "".join([said.reasoning, said.content, *(arguments for _, arguments in said.calls)]).encode()


@given(noisy_cases(), st.booleans())
def test_without_tools_only_marks_and_the_newlines_beside_them_are_lost(case, complete):
    """The law, for families with marks: a reply is [white space, opening] newlines thought newlines closing
    newlines answer, and thought and answer come out as they are."""
    if case.family.channels:
        return
    said = outcome_of(split(untooled(case), [case.text], complete=complete))
    assert (said.reasoning, said.content) == parted(case, complete=complete)
    assert not said.calls


def untooled(case: Case) -> Case:
    return Case(
        name=case.name,
        text=case.text,
        family=case.family,
        tools=NO_TOOLS,
        thought_is_open=case.thought_is_open,
        thinking=case.thinking,
    )


def parted(case: Case, *, complete: bool) -> tuple[str, str]:
    """Thought and answer of a whole reply without calls."""
    marks, text = case.family.thought, case.text
    if marks is None:
        return "", text
    begun = text.lstrip()
    is_assumed = False
    if not case.thought_is_open:
        if begun.startswith(marks.opening):
            text = begun.removeprefix(marks.opening)
        elif marks.opening.startswith(begun) or not (case.family.orphan_close and case.thinking):
            return "", text
        else:
            is_assumed = True
    thought, closing, answer = text.partition(marks.closing)
    if closing:
        return thought.strip("\n"), answer.lstrip("\n")
    thought = thought.lstrip("\n")
    return thought, thought if is_assumed and complete else ""


OPENERS = ("<tool_call>", "<function", "<|tool_call", "[TOOL_CALLS]", "<|python_tag|>", "{")


@given(noisy_cases(noise.map(lambda text: remove_all(text, OPENERS))))
def test_a_text_without_an_opener_passes_whatever_tools_there_are(case):
    if not case.family.channels:
        assert split(case, [case.text]) == split(untooled(case), [case.text], complete=case.complete)


def remove_all(text: str, parts: tuple[str, ...]) -> str:
    while any(part in text for part in parts):
        for part in parts:
            text = text.replace(part, "")
    return text


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"gpt_oss", "llama3", "glm4"}))
def test_a_thought_and_an_answer_go_out_as_they_come(name):
    marks = FAMILIES[name].thought
    assert marks is not None
    splitter = make_splitter(FAMILIES[name], TOOLS, thought_is_open=False, thinking=True)
    said = [
        splitter.feed(piece)
        for piece in (marks.opening, "Hm", ".\n", marks.closing, "\n\n", "Yes", " ", "we can")
    ]
    hm, point, yes, can = Reasoning("Hm"), Reasoning("."), Content("Yes"), Content(" we can")
    assert said == [[], [hm], [point], [], [], [yes], [], [can]]


def test_a_splitter_tells_whether_it_is_in_a_thought():
    splitter = make_splitter(FAMILIES["qwen3"], TOOLS, thought_is_open=False, thinking=True)
    told = []
    for piece in ("<thi", "nk>", "Hm", "</think", ">", "Yes"):
        splitter.feed(piece)
        told.append(splitter.in_thought)
    assert told == [False, True, True, True, False, False]


def test_the_text_of_a_completion_passes_as_it_is():
    splitter = PlainSplitter()
    assert splitter.feed("<think> ") == [Content("<think> ")]
    assert splitter.feed("") == []
    assert splitter.close(complete=True) == []
    assert not (splitter.in_thought or splitter.calls or splitter.call_is_open)
