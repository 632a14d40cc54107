"""Calls are found in every format; what is none stays text, and no word is lost or written twice."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output
from start_llm.core.family import Family
from start_llm.core.markers import first_marker, longest_beginning
from start_llm.formats.reading.json_calls import JsonScanner
from start_llm.formats.registry import NOTATIONS, all_notations
from start_llm.output.splitter import make_splitter
from tests.output.corpus.case import NO_TOOLS, TOOLS, Case, outcome_of, split
from tests.output.corpus.common import VALUES
from tests.output.corpus.writers import WRITERS
from tests.output.replies import Part, pieces_of, stories


def is_open(part: Part, text: str) -> bool:
    """Whether this part is a call that does not end within the text."""
    return part.kind == "broken" or (part.kind != "prose" and part.text not in text)


@given(st.data(), stories("call", "refused", "broken", "prose"))
def test_every_word_comes_out_exactly_once_however_the_reply_is_cut(data, story):
    """But for a call that the limit leaves open behind a whole one, and what stands in it: it is markup."""
    text = story.case.text[: data.draw(st.integers(0, len(story.case.text)))]
    complete = data.draw(st.booleans())
    outcome = outcome_of(split(story.case, data.draw(pieces_of(text)), complete=complete))
    output = "\0".join([outcome.reasoning, outcome.content, *(arguments for _, arguments in outcome.calls)])
    words = [
        *story.words("call", "refused", "broken", "prose"),
        *([story.reasoning.word] if story.reasoning else []),
    ]
    if outcome.closed_calls and not complete:
        first_open = next((place for place, part in enumerate(story.parts) if is_open(part, text)), None)
        behind = {part.word for part in story.parts[first_open:]} if first_open is not None else set[str]()
        words = [word for word in words if word not in behind or word in output]
    assert {word: output.count(word) for word in words} == {word: text.count(word) for word in words}


@pytest.mark.thorough
@given(stories("call", "refused", "prose"))
def test_good_calls_beside_bad_ones_survive_and_nothing_else_is_called(story):
    outcome = outcome_of(split(story.case, [story.case.text]))
    called = [json.loads(arguments)["text"].strip("\n<>") for _, arguments in outcome.closed_calls]
    if not story.writer.starts_reply:
        assert called == story.words("call")
    assert set(called) <= set(story.words("call"))
    assert outcome.open_call is None


@given(stories("call", "prose"))
def test_of_calls_and_prose_no_markup_is_left(story):
    if not story.writer.starts_reply:
        outcome = outcome_of(split(story.case, [story.case.text]))
        assert "".join(outcome.content.split()) == "".join(story.words("prose"))


@given(stories("call", "refused", "broken", "prose"))
def test_before_a_call_no_white_space_is_sent(story):
    before = Content("")
    for event in split(story.case, [story.case.text]):
        if isinstance(event, CallStarted) and isinstance(before, Content):
            assert before.text == before.text.rstrip()
        before = event


@pytest.mark.parametrize("name", ["qwen_xml", "glm", "minicpm", "minimax", "dsml_tools"])
def test_a_text_argument_goes_out_as_it_comes(name):
    writer = WRITERS[name]
    begin, end = writer.call("write", path="a", text="\0").split("\0")
    splitter = make_splitter(writer.family, TOOLS, reasoning_is_open=False, thinking=True)
    assert outcome_of(splitter.feed(begin)).open_call == ("write", '{"path": "a"')
    for piece in ("one", " two", "\nthree"):
        (event,) = splitter.feed(piece)
        assert isinstance(event, CallArguments)
        assert json.loads('"' + event.text.removeprefix(', "text": "') + '"') == piece
    *_, last = splitter.feed(end)
    assert last == CallEnded(0)


@pytest.mark.parametrize("name", sorted(name for name in WRITERS if not WRITERS[name].streams))
def test_a_call_that_is_an_object_goes_out_when_it_is_whole(name):
    writer = WRITERS[name]
    text = writer.call("write", path="a", text="b")
    splitter = make_splitter(writer.family, TOOLS, reasoning_is_open=False, thinking=True)
    steps = [splitter.feed(letter) for letter in text]
    (events,) = [step for step in steps if step] or [splitter.close(complete=True)]
    assert [type(event) for event in events] == [CallStarted, CallArguments, CallEnded]


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_value_of_thirty_thousand_letters_arrives(name):
    value = "x = 'a<b>' \\ \"c\"\n" * 2000
    writer = WRITERS[name]
    case = Case(name="long", text=writer.call("write", text=value), family=writer.family)
    (call,) = outcome_of(
        split(case, [case.text[i : i + 97] for i in range(0, len(case.text), 97)])
    ).closed_calls
    assert json.loads(call[1]) == {"text": value}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_every_format_is_recognised_whatever_the_family(name):
    if WRITERS[name].family.channels:
        return
    text = WRITERS[name].call("write", path="a", text=VALUES["indented code"])
    for family in (Family(name="bare"), WRITERS["kimi"].family, WRITERS["gemma4"].family):
        splitter = make_splitter(family, TOOLS, reasoning_is_open=False, thinking=True)
        outcome = outcome_of([*splitter.feed(text), *splitter.close(complete=True)])
        assert [(tool, json.loads(arguments)) for tool, arguments in outcome.closed_calls] == [
            ("write", {"path": "a", "text": VALUES["indented code"]})
        ]


def test_an_answer_in_json_goes_out_as_it_comes():
    splitter = make_splitter(Family(name="bare"), TOOLS, reasoning_is_open=False, thinking=True)
    assert splitter.feed('{"lines": [1,') == [Content("{"), Content('"lines": [1,')]
    assert splitter.feed(" 2") == [Content(" 2")]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["[", "1, ", "2"], ["", "[1,", " 2"]),
        (["[x", "] ta", "sk"], ["", "[x] ta", "sk"]),
        (["[read", "](http", "s:"], ["", "[read](http", "s:"]),
        (["[see(", "the", " docs)", " so"], ["", "", "[see(the docs)", " so"]),
        (["[\n", "{", '"path":'], ["", "", '[\n{"path":']),
        (["func", "tions", " so"], ["", "functions", " so"]),
        (["call", "ed", "!"], ["", "called", "!"]),
        (["call: ", "me"], ["call:", " me"]),
    ],
)
def test_an_answer_that_begins_as_a_bare_call_may_goes_out_as_soon_as_it_is_none(pieces, shown):
    splitter = make_splitter(Family(name="bare"), TOOLS, reasoning_is_open=False, thinking=True)
    assert [outcome_of(splitter.feed(piece)).content for piece in pieces] == shown


def test_prose_before_a_call_goes_out_as_it_comes():
    writer = WRITERS["qwen_xml"]
    splitter = make_splitter(writer.family, TOOLS, reasoning_is_open=False, thinking=True)
    steps = [splitter.feed(piece) for piece in ("I ", "look", " at <b", ">", "\n<tool", "_call>")]
    assert steps == [[Content("I")], [Content(" look")], [Content(" at <b")], [Content(">")], [], []]


def test_nothing_is_held_back_without_tools():
    splitter = make_splitter(Family(name="bare"), NO_TOOLS, reasoning_is_open=False, thinking=True)
    assert splitter.feed("<tool_call") == [Content("<tool_call")]


def test_a_call_that_is_open_is_sent_as_open():
    splitter = make_splitter(WRITERS["qwen_xml"].family, TOOLS, reasoning_is_open=False, thinking=True)
    states: list[tuple[int, bool]] = []
    for piece in (
        "<tool_call><function=read>",
        "<parameter=path>a",
        "</parameter></function>",
        "</tool_call>",
    ):
        splitter.feed(piece)
        states.append((splitter.counter.completed, splitter.counter.is_open))
    assert states == [(0, False), (0, True), (1, False), (1, False)]


def test_calls_are_counted_through_the_reply():
    text = WRITERS["hermes"].call("list") + WRITERS["glm"].call("list") + WRITERS["kimi"].call("list")
    splitter = make_splitter(Family(name="bare"), TOOLS, reasoning_is_open=False, thinking=True)
    events: list[Output] = splitter.feed(text)
    assert [event.index for event in events if isinstance(event, CallEnded)] == [0, 1, 2]


def test_the_formats_of_a_family_stand_first_and_no_other_is_missing():
    formats = all_notations(("kimi", "glm"))
    assert [notation.name for notation in formats[:2]] == ["kimi", "glm"]
    assert {notation.name for notation in formats} == set(NOTATIONS)
    assert len(formats) == len(NOTATIONS)


def test_a_format_that_no_row_has_is_an_error():
    with pytest.raises(KeyError):
        all_notations(("morse",))


@given(st.text("ab<>", max_size=12), st.lists(st.text("ab<>", min_size=1, max_size=5), max_size=4))
def test_what_is_held_back_is_the_longest_tail_that_may_begin_a_marker(text, markers):
    tails = [length for length in range(1, len(text) + 1) for mark in markers
             if len(mark) > length and mark.startswith(text[-length:])]  # fmt: skip
    assert longest_beginning(text, markers) == max(tails, default=0)


@given(st.text("ab<>", max_size=12), st.lists(st.text("ab<>", min_size=1, max_size=5), max_size=4))
def test_the_marker_that_begins_first_is_found_and_the_longest_of_several(text, markers):
    assert first_marker(text, markers, goes_on=False) == first_and_longest(text, markers)


@given(st.text("ab<>", max_size=12), st.lists(st.text("ab<>", min_size=1, max_size=5), max_size=4))
def test_while_text_may_follow_a_marker_waits_exactly_if_it_may_become_a_longer_one(text, markers):
    first = first_and_longest(text, markers)
    waits = first is not None and any(
        mark.startswith(text[first[0] :]) and len(mark) > len(text) - first[0] for mark in markers
    )
    assert first_marker(text, markers) == (None if waits else first)


def first_and_longest(text, markers):
    places = [(start, mark) for start in range(len(text)) for mark in markers if text.startswith(mark, start)]
    return min(places, key=lambda match: (match[0], -len(match[1])), default=None)


objects = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('a"\\{}[]é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('k"}', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_nothing_between_a_backslash_and_what_it_escapes_changes_nothing():
    span = JsonScanner()
    assert [span.feed(piece) for piece in ('{"k\\', "", '\\": null}"]')] == [None, None, 13]


@given(
    st.data(),
    st.dictionaries(st.text("k\\", max_size=3), objects, max_size=4),
    st.text('}]{["a<', max_size=5),
)
def test_the_end_of_an_object_is_found_however_it_is_cut(data, value, after):
    text = json.dumps(value, ensure_ascii=False, indent=data.draw(st.sampled_from([None, 1])))
    span, length = JsonScanner(), 0
    for piece in data.draw(pieces_of(text + after)):
        end = span.feed(piece)
        if end is not None:
            assert end == len(text)
            return
        length += len(piece)
        assert length < len(text)
    raise AssertionError("the end was not found")


@pytest.mark.parametrize("name", WRITERS)
def test_compact_json_is_the_same_call_however_it_is_cut(name):
    text = '<tool_call>{"name":"write","arguments":{"text":"b"}}</tool_call>'
    case = Case(name="compact", text=text, family=WRITERS[name].family)
    whole, letters = (outcome_of(split(case, pieces)) for pieces in ([text], list(text)))
    assert whole == letters
    assert [called for called, _ in whole.calls] == ["write"] or case.family.channels
