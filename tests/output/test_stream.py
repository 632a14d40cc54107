"""Every token of a reply belongs to one event, reasoning is counted, and the end is as clients know it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    FinishReason,
    Output,
    Reasoning,
    ScoredToken,
    Text,
    TokenLogprobs,
    Usage,
)
from start_llm.core.family import Family
from start_llm.output.splitter import PlainSplitter, make_splitter
from start_llm.output.stream import OutputStream, merge_adjacent
from tests.output.corpus.case import TOOLS, Call, Case
from tests.output.corpus.writers import HARMONY, WRITERS
from tests.output.replies import noisy_cases, pieces_of

QWEN, GLM = WRITERS["qwen_xml"], WRITERS["glm"]
CALL = QWEN.call("read", path="a")


def scored(token: int) -> TokenLogprobs:
    return TokenLogprobs(ScoredToken(token, -1.0), ())


def texts(*pieces: str) -> list[Text]:
    """Pieces of a reply, a token each."""
    return [Text(piece, (token,), (scored(token),)) for token, piece in enumerate(pieces)]


def stream_of(family: Family, **options: bool) -> OutputStream:
    options = {"reasoning_is_open": False, "thinking": True} | options
    return OutputStream(make_splitter(family, TOOLS, **options))


def heard(
    stream: OutputStream, pieces: list[Text], reason: FinishReason = "stop", stop: str | None = None
) -> tuple[list[Output], Finished]:
    outputs = [output for piece in pieces for output in stream.feed(piece)]
    usage = Usage(prompt=1, cached=0, completion=len(pieces))
    rest, end = stream.close(Finished(reason, usage, stop))
    return [*outputs, *rest], end


@given(st.data(), noisy_cases())
def test_every_token_belongs_to_exactly_one_event_and_keeps_its_place(data, case: Case):
    pieces = texts(*data.draw(pieces_of(case.text)), "")
    stream = stream_of(case.family, reasoning_is_open=case.reasoning_is_open, thinking=case.thinking)
    outputs, end = heard(stream, pieces, reason="stop" if case.complete else "length")
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == list(range(len(pieces)))
    assert [entry.chosen.token for output in outputs for entry in output.logprobs] == tokens
    assert end.usage.reasoning <= end.usage.completion
    assert [token for output in merge_adjacent(outputs) for token in output.tokens] == tokens


def test_a_token_belongs_to_the_first_event_after_it():
    outputs, _ = heard(stream_of(QWEN.family), texts("<thi", "nk>", "Hm", "</think>", "\n", "Yes", ""))
    assert [(type(output), output.tokens) for output in outputs] == [
        (Reasoning, (0, 1, 2)),
        (Content, (3, 4, 5)),
        (Content, (6,)),
    ]


def test_of_several_events_of_one_token_the_first_has_it():
    outputs, _ = heard(stream_of(QWEN.family), texts("Yes", CALL))
    assert [output.tokens for output in outputs] == [(0,), (1,), *[()] * (len(outputs) - 2)]


def test_tokens_after_the_last_event_come_with_an_empty_text():
    outputs, _ = heard(stream_of(QWEN.family), texts("Yes", "\n", "", ""))
    assert outputs[1:] == [Content("\n", tokens=(1, 2, 3), logprobs=(scored(1), scored(2), scored(3)))]
    outputs, _ = heard(stream_of(QWEN.family), texts(CALL, ""))
    assert outputs[-1] == Content("", tokens=(1,), logprobs=(scored(1),))


def test_a_reply_without_tokens_has_no_events():
    assert heard(stream_of(QWEN.family), []) == (
        [],
        Finished("stop", Usage(prompt=1, cached=0, completion=0)),
    )


@pytest.mark.parametrize(
    ("family", "pieces", "tokens"),
    [
        (QWEN.family, ["<think>", "Hm", ".", "</think>", "Yes"], 4),
        (QWEN.family, ["<", "thi", "nk>", "Hm", "</", "think>", "\n\n", "Yes"], 6),
        (QWEN.family, ["<", "thi", "ck>", "Hm"], 0),
        (QWEN.family, ["Yes", "<think>", "Hm", "</think>"], 0),
        (QWEN.family, ["<think>", "Hm", "\n\n", ""], 4),
        (QWEN.family, [" ", "<think>", "</think>", "Yes"], 3),
        (QWEN.family, [CALL, ""], 0),
        (HARMONY, ["<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>", "<|start|>", "assistant",
                   "<|channel|>", "final", "<|message|>", "Yes"], 5),
        (HARMONY, ["<|channel|>", "final", "<|message|>", "Yes"], 0),
        (HARMONY, ["<|channel|>", "commentary", " to=functions.list", "<|message|>", "{}", "<|call|>"], 0),
        (Family(name="none"), ["<think>", "Hm", "</think>"], 0),
    ],
)  # fmt: skip
def test_the_tokens_of_reasoning_and_its_marks_are_counted(family, pieces, tokens):
    _, end = heard(stream_of(family), texts(*pieces))
    assert end.usage == Usage(prompt=1, cached=0, completion=len(pieces), reasoning=tokens)


def test_the_tokens_of_reasoning_that_the_prompt_opened_are_counted():
    _, end = heard(stream_of(QWEN.family, reasoning_is_open=True), texts("Hm", "</think>", "Yes"))
    assert end.usage.reasoning == 2


@pytest.mark.parametrize(
    ("text", "reason", "stop", "reported"),
    [
        ("Yes", "stop", None, "stop"),
        ("Yes", "length", None, "length"),
        ("Yes", "stop", "END", "stop"),
        (CALL, "stop", None, "tool_calls"),
        (f"{CALL} and", "stop", None, "tool_calls"),
        (CALL + CALL.removesuffix("</function>\n</tool_call>"), "stop", None, "tool_calls"),
        (CALL + CALL.removesuffix("</function>\n</tool_call>"), "length", None, "length"),
        (CALL + CALL.removesuffix("</function>\n</tool_call>"), "stop", "END", "stop"),
        (CALL.partition("a\n")[0], "stop", None, "stop"),
        (CALL.partition("a\n")[0], "length", None, "length"),
        (f"<think>{CALL}", "stop", None, "tool_calls"),
        (f"<think>{CALL}", "length", None, "length"),
        (f"<think>{CALL}</think>", "stop", None, "stop"),
        (CALL.replace("read", "remove"), "stop", None, "tool_calls"),
    ],
)
def test_a_reply_ends_with_calls_only_if_there_are_some_and_none_is_open(text, reason, stop, reported):
    _, end = heard(stream_of(QWEN.family), texts(text), reason, stop)
    assert (end.reason, end.stop) == (reported, stop)


def test_the_text_of_a_completion_passes_with_its_tokens():
    outputs, end = heard(OutputStream(PlainSplitter()), texts("<think>", "", "a", ""))
    assert [(output, output.tokens) for output in outputs if isinstance(output, Content)] == list(
        zip(outputs, [(0,), (1, 2), (3,)], strict=True)
    )
    assert "".join(output.text for output in outputs if isinstance(output, Content)) == "<think>a"
    assert end.usage.reasoning == 0


STOPS = ("\n\n", "weigh it", "deep", "path", "<", "|", "{", "call", "read")
"""Each stands in the reasoning, in the markup or in a call below, and none in the text."""


@pytest.mark.parametrize("stops", [*((stop,) for stop in STOPS), STOPS], ids=str)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.product
def test_a_stop_string_in_reasoning_markup_or_a_call_is_none(name: str, stops: tuple[str, ...]):
    writer = WRITERS[name]
    reasoning, text = "Let me weigh it:\n\ndeep?", "Yes."
    call = writer.call("write", path="path", text="deep\n\n<|{ call read weigh it")
    prose = "" if writer.starts_reply else text
    if writer.family.channels:
        start = "<|end|><|start|>assistant<|channel|>"
        written = f"<|channel|>analysis<|message|>{reasoning}{start}commentary<|message|>{prose}<|end|>{call}"
    else:
        written = f"<think>\n{reasoning}\n</think>\n\n{prose}\n\n{call}"
    ended = {}
    for pieces in ([written], list(written), [written[i : i + 7] for i in range(0, len(written), 7)]):
        for active in ((), stops):
            splitter = make_splitter(writer.family, TOOLS, reasoning_is_open=False, thinking=True)
            outputs, end = heard(OutputStream(splitter, stops=active), texts(*pieces))
            content = "".join(output.text for output in outputs if isinstance(output, Content))
            calls = [output for output in merge_adjacent(outputs) if isinstance(output, CallArguments)]
            ended[active, len(pieces)] = (content, [call.text for call in calls], end.reason, end.stop)
            assert "".join(output.text for output in outputs if isinstance(output, Reasoning)) == reasoning
    assert len({repr(active) for active in ended.values()}) == 1
    assert ended[stops, 1][0] == prose
    assert ended[stops, 1][2:] == ("tool_calls", None)


@pytest.mark.parametrize("name", ["qwen_xml", "hermes", "glm", "gemma4", "harmony"])
def test_a_stop_string_that_the_answer_and_the_reasoning_hold_ends_the_answer_alone(name: str):
    writer = WRITERS[name]
    reasoning, call = "So END and\n\nEND", writer.call("list")
    start = "<|end|><|start|>assistant<|channel|>"
    written = (
        f"<|channel|>analysis<|message|>{reasoning}{start}final<|message|>It is END of it.{call}"
        if writer.family.channels
        else f"<think>{reasoning}</think>\n\nIt is END of it.{call}"
    )
    for size in (1, 2, 3, 5, len(written)):
        splitter = make_splitter(writer.family, TOOLS, reasoning_is_open=False, thinking=True)
        stream = OutputStream(splitter, stops=("END", "\n\n"))
        outputs = [
            output
            for piece in texts(*(written[i : i + size] for i in range(0, len(written), size)))
            if not stream.is_over
            for output in stream.feed(piece)
        ]
        assert "".join(output.text for output in outputs if isinstance(output, Reasoning)) == reasoning
        assert "".join(output.text for output in outputs if isinstance(output, Content)) == "It is "
        assert not any(isinstance(output, CallStarted) for output in outputs)
        assert stream.is_over
        end = stream.cut(Usage(prompt=1, cached=0, completion=1))
        assert (end.reason, end.stop) == ("stop", "END")


EVENTS: list[Output] = [
    Content("a", tokens=(1,), logprobs=(scored(1),)),
    Content("b", tokens=(2, 3), logprobs=(scored(2), scored(3))),
    Reasoning("c"),
    Reasoning("d", tokens=(4,)),
    CallStarted(0, "read", tokens=(5,)),
    CallArguments(0, "{"),
    CallArguments(0, "}", tokens=(6,)),
    CallEnded(0),
    CallStarted(1, "list"),
    CallEnded(1),
    Content("e"),
]


def test_neighbours_of_one_kind_become_one_event():
    assert list(merge_adjacent(EVENTS)) == [
        Content("ab", tokens=(1, 2, 3), logprobs=(scored(1), scored(2), scored(3))),
        Reasoning("cd", tokens=(4,)),
        CallStarted(0, "read", tokens=(5,)),
        CallArguments(0, "{}", tokens=(6,)),
        *EVENTS[7:],
    ]


def test_arguments_of_two_calls_stay_apart():
    two: list[Output] = [CallArguments(0, "{}"), CallArguments(1, "{}")]
    assert list(merge_adjacent(two)) == two


def test_an_event_is_reported_as_soon_as_no_neighbour_can_follow():
    taken = itertools.count()
    source = (event for event in EVENTS if next(taken) >= 0)
    assert next(iter(merge_adjacent(source))).tokens == (1, 2, 3)
    assert next(taken) == 3


@given(st.lists(st.sampled_from(EVENTS)))
def test_joining_what_is_joined_changes_nothing(events):
    once = list(merge_adjacent(events))
    assert list(merge_adjacent(once)) == once
    assert [token for event in once for token in event.tokens] == [
        token for event in events for token in event.tokens
    ]


SECOND = Call("write", {"path": "b", "text": "second value"})


@pytest.mark.parametrize("name", [name for name in WRITERS if not WRITERS[name].family.channels])
@pytest.mark.sample(24)
def test_of_a_call_that_is_cut_behind_a_whole_one_nothing_is_text_and_the_reason_is_the_limit(name: str):
    """A demanded call that ran on into a second one ended with its markup as text beside the first."""
    writer = WRITERS[name]
    first = Call("write", {"path": "a", "text": "x"})
    both, whole = writer.write([first, SECOND]), writer.write([first])
    shared = next(n for n, (item, other) in enumerate(zip(both, f"{whole}\0", strict=False)) if item != other)
    for end in range(len(both)):
        stream = stream_of(writer.family, thinking=False)
        outputs, finished = heard(stream, texts(both[:end]), "length")
        if not any(isinstance(item, CallEnded) for item in outputs):
            continue
        assert "".join(item.text for item in outputs if isinstance(item, Content)) == "", both[:end]
        is_in_second = SECOND.name in both[shared:end]
        if is_in_second and sum(isinstance(item, CallEnded) for item in outputs) == 1:
            assert finished.reason == "length", both[:end]
            assert not stream.is_whole


def test_text_behind_a_call_is_shown_up_to_where_it_was_cut():
    for cut in ("Done", "Done < 3", "Done\n\nNow"):
        outputs, finished = heard(stream_of(QWEN.family), texts(CALL, cut), "length")
        assert "".join(output.text for output in outputs if isinstance(output, Content)) == cut
        assert finished.reason == "tool_calls"
