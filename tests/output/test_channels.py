"""Harmony's messages: what each channel means as it comes, and that no text can stop the splitter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Reasoning
from start_llm.output.splitter import make_splitter
from tests.output.corpus.case import TOOLS, Case, outcome_of, split
from tests.output.corpus.writers import HARMONY
from tests.output.replies import pieces_of

HEADERS = {
    "reasoning": "<|channel|>analysis<|message|>",
    "answer": "<|channel|>final<|message|>",
    "preamble": "<|channel|>commentary<|message|>",
}
CALL = '<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "a"}<|call|>'


def test_reasoning_and_answers_go_out_as_they_come():
    splitter = make_splitter(HARMONY, TOOLS, reasoning_is_open=False, thinking=True)
    steps = [
        splitter.feed(piece)
        for piece in ("<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>",
                      "assistant", "<|channel|>", "final", "<|message|>", "Yes", " <", "b")
    ]  # fmt: skip
    assert steps == [
        [],
        [],
        [],
        [Reasoning("Hm")],
        [Reasoning(".")],
        *[[]] * 6,
        [Content("Yes")],
        [],
        [Content(" <b")],
    ]


def test_a_splitter_tells_whether_it_is_in_reasoning():
    splitter = make_splitter(HARMONY, TOOLS, reasoning_is_open=False, thinking=True)
    states = []
    for piece in (HEADERS["reasoning"], "Hm", "<|end|>", "<|start|>assistant" + HEADERS["answer"], "Yes"):
        splitter.feed(piece)
        states.append(splitter.in_reasoning)
    assert states == [True, True, False, False, False]


def test_a_call_is_reported_when_its_message_ends():
    splitter = make_splitter(HARMONY, TOOLS, reasoning_is_open=False, thinking=True)
    assert splitter.feed(CALL.removesuffix("|>")) == []
    assert splitter.feed("|>") == [CallStarted(0, "read"), CallArguments(0, '{"path": "a"}'), CallEnded(0)]
    assert (splitter.counter.completed, splitter.counter.is_open) == (1, False)


def test_prose_after_the_object_of_a_call_makes_it_text_without_its_header():
    text = CALL.replace("}<", "} is it<")
    outcome = outcome_of(split(Case(name="", text=text, family=HARMONY), [text]))
    assert (outcome.content, outcome.calls) == ('{"path": "a"} is it', [])


def test_behind_a_whole_call_nothing_of_a_cut_one_is_shown():
    text = CALL + CALL.removesuffix("}<|call|>")
    outcome = outcome_of(split(Case(name="", text=text, family=HARMONY), [text], complete=False))
    assert (outcome.content, [name for name, _ in outcome.closed_calls]) == ("", ["read"])


@pytest.mark.thorough
@given(
    st.data(),
    st.lists(
        st.tuples(
            st.sampled_from(sorted(HEADERS)), st.text("ab <|\n", max_size=6).map(lambda text: f"a{text}b")
        ),
        max_size=5,
    ),
)
def test_the_text_of_every_message_comes_out_as_it_is(data, messages):
    """The law: messages with known headers lose their headers and ends, and nothing else."""
    text = "<|start|>assistant".join(f"{HEADERS[kind]}{body}<|end|>" for kind, body in messages)
    outcome = outcome_of(split(Case(name="", text=text, family=HARMONY), data.draw(pieces_of(text))))
    assert outcome.reasoning == "".join(body for kind, body in messages if kind == "reasoning")
    assert outcome.content == "".join(body for kind, body in messages if kind != "reasoning")


@given(st.text("ab <>|=:!\n", max_size=30))
def test_a_text_without_markers_is_the_answer(text):
    outcome = outcome_of(split(Case(name="", text=text, family=HARMONY), [text]))
    assert outcome.content.strip() == text.strip()
    assert not outcome.reasoning


ASKING = (
    '<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant to=functions.read<|message|>{"a": 1}'
)


@pytest.mark.parametrize(
    ("text", "is_loose"),
    [
        ("Hello", False),
        ("<|channel|>final<|message|>Hello", False),
        (ASKING, False),
        (ASKING.partition("<|start|>")[0], True),
        (ASKING.partition("to=")[0], True),
        (ASKING.partition("read")[0], True),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_a_reply_that_ends_in_a_header_has_a_loose_end(text, is_loose, complete):
    splitter = make_splitter(HARMONY, TOOLS, reasoning_is_open=False, thinking=True)
    splitter.feed(text)
    splitter.close(complete)
    assert splitter.has_loose_end is is_loose


@pytest.mark.parametrize("text", [" t", " to=", " to=functions.re"])
def test_a_recipient_that_was_cut_at_the_beginning_is_a_loose_end_and_at_the_end_a_text(text):
    for complete in (False, True):
        splitter = make_splitter(HARMONY, TOOLS, reasoning_is_open=False, thinking=True)
        events = [*splitter.feed(text), *splitter.close(complete)]
        assert "".join(event.text for event in events if isinstance(event, Content)) == text
        assert splitter.has_loose_end is not complete


def test_a_call_that_was_cut_is_reported_as_one():
    splitter = make_splitter(HARMONY, TOOLS, reasoning_is_open=False, thinking=True)
    splitter.feed(ASKING[:-1])
    splitter.close(complete=False)
    assert splitter.was_cut_in_call
