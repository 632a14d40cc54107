"""A reply is split into reasoning, answer and calls as the corpus says, however its text is cut."""

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from start_llm.core.events import Content, Reasoning
from start_llm.core.markers import first_marker, longest_beginning
from start_llm.formats.registry import NOTATIONS
from start_llm.output.splitter import PlainSplitter, make_splitter
from tests.output.corpus import CORPUS
from tests.output.corpus.case import NO_TOOLS, TOOLS, Case, outcome_of, split
from tests.output.corpus.writers import WRITERS
from tests.output.replies import FAMILIES, noise, noisy_cases, pieces_of
from tests.slices import is_whole

CALLED = '<tool_call>{"name": "list", "arguments": {}}</tool_call>'
SHORT = 150
"""Texts up to this length are cut at every place, longer ones at some."""
EVERY = 1 if is_whole() else 3
"""Where a run leaves anything out, a text is cut at one of so many places, which depend on its length."""


def cuts(text: str) -> range:
    step = 1 if len(text) <= SHORT else max(1, len(text) // 25)
    return range(1 + len(text) % EVERY, len(text), step * EVERY)


def writer_and_name(case: str) -> Sequence[str]:
    """Cases that are common to all writers run for one of them by default."""
    return case.split(": ", 1)


@pytest.mark.checked(6)
@pytest.mark.product(axes=writer_and_name)
@pytest.mark.sample(260)
@pytest.mark.parametrize("name", CORPUS)
def test_a_reply_means_what_the_corpus_says_however_it_is_cut(name):
    case = CORPUS[name]
    whole = split(case, [case.text])
    outcome = outcome_of(whole)
    assert outcome.reasoning == case.reasoning
    assert outcome.content == case.content
    assert [(tool, json.loads(arguments)) for tool, arguments in outcome.closed_calls] == [
        (call.name, call.arguments) for call in case.calls
    ]
    assert outcome.open_call == case.open_call
    for call, (_, arguments) in zip(case.calls, outcome.closed_calls, strict=True):
        assert call.raw in (None, arguments)
    assert split(case, case.text) == whole
    for cut in cuts(case.text):
        assert split(case, [case.text[:cut], case.text[cut:]]) == whole


@pytest.mark.checked(6)
@pytest.mark.sample(180)
@pytest.mark.parametrize("name", [name for name in CORPUS if ": value" not in name])
def test_a_reply_that_ends_anywhere_keeps_what_it_has_said(name):
    case = CORPUS[name]
    whole = outcome_of(split(case, [case.text], complete=False))
    for cut in cuts(case.text):
        text = case.text[:cut]
        outcome = outcome_of(split(case, [text], complete=False))
        assert outcome.closed_calls == whole.closed_calls[: outcome.ended]
        if outcome.open_call:
            tool, arguments = outcome.open_call
            assert whole.calls[outcome.ended][0] == tool
            assert whole.calls[outcome.ended][1].startswith(arguments)
        assert is_beginning_and_tail(outcome.reasoning, whole.reasoning, text)
        assert is_beginning_and_tail(outcome.content, whole.content, text)


def is_beginning_and_tail(shown: str, whole: str, text: str) -> bool:
    """True if this is a beginning of the whole reply, then the text that was held back at the cut."""
    same = next(
        (i for i, (a, b) in enumerate(zip(shown, whole, strict=False)) if a != b), min(len(shown), len(whole))
    )
    return any(text.endswith(shown[i:].lstrip()) for i in range(same, -1, -1))


@pytest.mark.thorough
@given(st.data(), noisy_cases())
def test_no_text_raises_and_how_it_was_cut_changes_nothing(data, case):
    whole = split(case, [case.text])
    assert split(case, data.draw(pieces_of(case.text))) == whole
    assert split(case, case.text) == whole


@given(noisy_cases())
def test_what_comes_out_can_always_be_sent(case):
    outcome = outcome_of(split(case, [case.text]))
    for tool, arguments in outcome.closed_calls:
        assert tool in TOOLS
        assert isinstance(json.loads(arguments), dict)
    "".join([outcome.reasoning, outcome.content, *(arguments for _, arguments in outcome.calls)]).encode()


@given(noisy_cases(), st.booleans())
def test_without_tools_only_marks_and_the_newlines_beside_reasoning_are_lost(case, complete):
    if case.family.channels:
        return
    # `_Law` knows nothing of marks around a whole answer; tests/output/test_answer_marks.py does.
    assume(not any(before in case.text for before, _ in case.family.around_answer))
    outcome = outcome_of(split(untooled(case), [case.text], complete=complete))
    assert (outcome.reasoning, outcome.content) == parted(case, complete=complete)
    assert not outcome.calls


def untooled(case: Case) -> Case:
    return Case(
        name=case.name,
        text=case.text,
        family=case.family,
        tools=NO_TOOLS,
        reasoning_is_open=case.reasoning_is_open,
        thinking=case.thinking,
    )


def parted(case: Case, *, complete: bool) -> tuple[str, str]:
    """Reasoning and answer of a whole reply without calls."""
    return _Law(case, complete).read() if case.family.reasoning else ("", case.text)


class _Law:
    """The law, for families with marks: white space, reasoning with white space between them, then the
    answer.

    Newlines beside reasoning are the template's. Unmistakable marks are marks in an answer too.
    """

    def __init__(self, case: Case, complete: bool) -> None:
        assert case.family.reasoning
        self.marks, self.complete = case.family.reasoning, complete
        self.opening, self.closing = self.marks.mark, self.marks.closing
        self.in_answer = (self.opening, self.closing, *case.family.answer_marks)
        self.may_assume = case.family.orphan_close and case.thinking and not case.reasoning_is_open
        self.state = "reasoning" if case.reasoning_is_open else "start"
        self.text = unlabelled(case.text, self.opening, self.marks.label)
        self.is_after_reasoning = False
        self.reasoning, self.answer = "", ""

    def read(self) -> tuple[str, str]:
        while self.state != "end":
            {"reasoning": self.read_reasoning, "start": self.read_start, "answer": self.read_answer}[
                self.state
            ]()
        return self.reasoning, self.answer

    def read_reasoning(self) -> None:
        reasoning, closing, self.text = self.text.partition(self.closing)
        while (begun := reasoning.lstrip("\n")).startswith(self.opening):
            reasoning = begun.removeprefix(self.opening)
        for mark in self.in_answer if self.marks.is_unmistakable else ():
            reasoning = reasoning.replace(mark, "")
        self.reasoning += reasoning.strip("\n") if closing else reasoning.lstrip("\n")
        self.is_after_reasoning = True
        self.state = "start" if closing else "end"

    def read_start(self) -> None:
        begun = self.text.lstrip()
        space = self.text[: len(self.text) - len(begun)]
        if begun.startswith(self.opening):
            self.state, self.text = "reasoning", begun.removeprefix(self.opening)
        elif begun.startswith(self.closing):
            self.is_after_reasoning, self.text = True, begun.removeprefix(self.closing)
        elif begun and any(mark.startswith(begun) for mark in (self.opening, self.closing)):
            is_text = len(begun) < 3 or (self.complete and not self.marks.is_unmistakable)
            self.answer += self.inner(space) + begun if is_text else ""
            self.state = "end"
        elif begun and self.may_assume and not self.is_after_reasoning:
            self.assume()
        else:
            self.state, self.text = "answer", self.inner(space) + begun

    def inner(self, space: str) -> str:
        return space.lstrip("\n") if self.is_after_reasoning else space

    def assume(self) -> None:
        if self.closing in self.text:
            self.state = "reasoning"
            return
        assumed = self.text.lstrip("\n")
        self.reasoning, self.answer, self.state = assumed, assumed if self.complete else "", "end"

    def read_answer(self) -> None:
        marks = self.in_answer if self.marks.is_unmistakable else ()
        start, mark = first_marker(self.text, marks) or (len(self.text), "")
        passage, self.text = self.text[:start], self.text[start + len(mark) :]
        if not mark and (half := longest_beginning(passage, marks)) > 2:
            passage = passage[: len(passage) - half]
        self.answer += passage
        if mark and not self.answer.strip():
            self.answer = ""
        self.state = "reasoning" if mark == self.opening else "answer" if mark else "end"


def unlabelled(text: str, mark: str, label: str) -> str:
    """The text without the labels of marks, and without half a label at its end."""
    halves = "|".join(label[:length] for length in range(1, len(label) + 1))
    return re.sub(rf"({re.escape(mark)})(?:{label}(?!\w)|(?:{halves})\Z)", r"\1", text) if label else text


OPENERS = tuple(text for notation in NOTATIONS.values() for text in (*notation.openers, *notation.bare))


@given(noisy_cases(noise.map(lambda text: remove_all(text, OPENERS))))
def test_a_text_without_an_opener_passes_whatever_tools_there_are(case):
    if not case.family.channels:
        assert split(case, [case.text]) == split(untooled(case), [case.text], complete=case.complete)


@pytest.mark.parametrize("text", ["<|", "<to", "<tool_ca", "\n<|tool", "[TOOL"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_reply_that_ends_in_half_an_opener_is_the_same_with_and_without_tools(text, complete):
    case = Case(name="half", text=text, family=FAMILIES["glm4"], complete=complete)
    assert split(case, [text]) == split(untooled(case), [text], complete=complete)
    assert split(case, text) == split(case, [text])


def remove_all(text: str, parts: tuple[str, ...]) -> str:
    while any(part in text for part in parts):
        for part in parts:
            text = text.replace(part, "")
    return text


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"gpt_oss", "llama3", "glm4"}))
def test_reasoning_and_an_answer_go_out_as_they_come(name):
    marks = FAMILIES[name].reasoning
    assert marks is not None
    splitter = make_splitter(FAMILIES[name], TOOLS, reasoning_is_open=False, thinking=True)
    steps = [
        splitter.feed(piece)
        for piece in (marks.opening, "\nHm", ".\n", marks.closing, "\n\n", "Yes", " ", "we can")
    ]
    hm, point, yes, can = Reasoning("Hm"), Reasoning("."), Content("Yes"), Content(" we can")
    assert steps == [[], [hm], [point], [], [], [yes], [], [can]]


def test_a_splitter_tells_whether_it_is_in_reasoning():
    splitter = make_splitter(FAMILIES["qwen3"], TOOLS, reasoning_is_open=False, thinking=True)
    states = []
    for piece in ("<thi", "nk>", "Hm", "</think", ">", "Yes"):
        splitter.feed(piece)
        states.append(splitter.in_reasoning)
    assert states == [False, True, True, True, False, False]


def test_reasoning_that_quotes_calls_goes_on_as_it_comes():
    splitter = make_splitter(FAMILIES["qwen3"], TOOLS, reasoning_is_open=True, thinking=True)
    steps = [splitter.feed(piece) for piece in ("I ", "`<tool_call", ">`\n", "or", CALLED, " ", "is", " it")]
    assert ["".join(event.text for event in step if isinstance(event, Reasoning)) for step in steps] == [
        "I ", "`", "", "<tool_call>`\nor", "", "", f"{CALLED} is", " it",
    ]  # fmt: skip


def test_of_an_opener_in_reasoning_little_waits():
    splitter = make_splitter(FAMILIES["qwen3"], TOOLS, reasoning_is_open=True, thinking=True)
    text = "I use <tool_call> and " + "so it is, " * 40
    reasoning = "".join(event.text for event in splitter.feed(text) if isinstance(event, Reasoning))
    assert reasoning == text


def test_calls_that_reasoning_ends_with_end_the_reasoning():
    splitter = make_splitter(FAMILIES["qwen3"], TOOLS, reasoning_is_open=True, thinking=True)
    assert splitter.feed(f"Hm.\n{CALLED}") == [Reasoning("Hm.")]
    assert (splitter.in_reasoning, splitter.counter.completed) == (True, 0)
    assert splitter.close(complete=True)
    assert (splitter.in_reasoning, splitter.counter.completed) == (False, 1)


@pytest.mark.parametrize(
    ("family", "text", "is_loose"),
    [
        ("qwen3", "<thin", True),
        ("qwen3", "<think>Hm.</think>\n</thi", True),
        ("qwen3", "Look: <tool_c", True),
        ("qwen3", "Look: functio", True),
        ("qwen3", "Look if", False),
        ("qwen3", "If 3 <", False),
        ("qwen3", "<", True),
        ("cohere", "<|START_RESPONSE|>Yes.<|END_RES", True),
        ("cohere", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", False),
        ("cohere", "<|START_RESPONSE|>Yes.", True),
        ("cohere", "<|START_RESPONSE|>Yes.<|END_RESPONSE|><|START_TEXT|>And", True),
        ("cohere", "Yes.", False),
        ("kimi_k3", "<|open|>response<|sep|>Yes.", True),
        ("kimi_k3", "<|open|>response<|sep|>Yes.<|close|>response<|sep|>", True),
        ("kimi_k3", "<|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>", False),
        ("kimi_k3", WRITERS["kimi_k3"].call("list"), True),
        ("kimi_k3", f"{WRITERS['kimi_k3'].call('list')}<|close|>message<|sep|>", False),
    ],
)
def test_a_reply_that_is_cut_before_the_end_of_its_marks_has_a_loose_end(family, text, is_loose):
    splitter = make_splitter(FAMILIES[family], TOOLS, reasoning_is_open=False, thinking=True)
    splitter.feed(text)
    splitter.close(complete=False)
    assert splitter.has_loose_end is is_loose


@pytest.mark.parametrize("text", ["<|START_RESPONSE|>Yes.", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>"])
def test_a_reply_that_its_model_ended_has_all_marks_that_it_will_have(text):
    splitter = make_splitter(FAMILIES["cohere"], TOOLS, reasoning_is_open=False, thinking=True)
    assert [*splitter.feed(text), *splitter.close(complete=True)] == [Content("Yes.")]
    assert not splitter.has_loose_end


@pytest.mark.parametrize(
    ("text", "is_loose"),
    [
        ("<|START_RESPO", True),
        ("<|START_RESPONSE|>{}", True),
        ("<|START_RESPONSE|>{}<|END_RESPONSE|>", False),
        ("{}", False),
    ],
)
def test_a_demanded_answer_that_is_cut_between_its_marks_has_a_loose_end(text, is_loose):
    splitter = make_splitter(
        FAMILIES["cohere"], NO_TOOLS, reasoning_is_open=False, thinking=False, calls_come_first=True
    )
    splitter.feed(text)
    splitter.close(complete=False)
    assert splitter.has_loose_end is is_loose


def test_marks_in_an_answer_that_is_held_to_its_form_are_text():
    splitter = make_splitter(
        FAMILIES["cohere"], NO_TOOLS, reasoning_is_open=False, thinking=False, calls_come_first=True
    )
    text = '{"a": "<|START_THINKING|><|END_RESPONSE|>"}'
    assert splitter.feed(text) == [Content(text)]


def test_the_text_of_a_completion_passes_as_it_is():
    splitter = PlainSplitter()
    assert splitter.feed("<think> ") == [Content("<think> ")]
    assert splitter.feed("") == []
    assert splitter.close(complete=True) == []
    assert not (splitter.in_reasoning or splitter.counter.completed or splitter.counter.is_open)
