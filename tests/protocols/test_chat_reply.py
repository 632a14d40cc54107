"""`ChatReply`: how the events of one reply become frames of a stream, and one body."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    Output,
    Reasoning,
)
from start_llm.output.stream import merge_adjacent
from start_llm.protocols.openai.chat_completions import ChatReply
from start_llm.transcripts.reply_echo import ReplyEcho
from tests.grammar import completions, wire
from tests.protocols.helpers import MODEL, USAGE, chat_replies, scored, streamed, whole

DONE = Finished("stop", USAGE)
CALLED = Finished("tool_calls", USAGE)


def reply(
    *, with_token_ids: bool = False, with_logprobs: bool = False, custom_tools: frozenset[str] = frozenset()
) -> ChatReply:
    return ChatReply(
        requested_model="m",
        model=MODEL,
        include_usage=False,
        with_token_ids=with_token_ids,
        with_logprobs=with_logprobs,
        custom_tools=custom_tools,
    )


def deltas(encoder: ChatReply, *outputs: Output, end: Finished = DONE) -> list[Any]:
    """Of every chunk between the opening and the end."""
    first, *chunks, last = streamed(encoder, list(outputs), end)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def message(encoder: ChatReply, *outputs: Output, end: Finished = CALLED) -> Any:
    return whole(encoder, list(outputs), end)["choices"][0]["message"]


def test_a_call_opens_with_everything_but_its_arguments_which_follow_by_index():
    (opening, first, second) = deltas(
        reply(), CallStarted(0, "read"), CallArguments(0, '{"a": '), CallArguments(0, "1}"), CallEnded(0)
    )
    (call,) = opening["tool_calls"]
    assert list(call) == ["index", "id", "type", "function"]
    assert call["function"] == {"name": "read", "arguments": ""}
    assert first == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]}
    assert second == {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}


def test_a_call_of_a_custom_tool_has_its_text():
    outputs = [CallStarted(0, "read"), CallArguments(0, "{}"), CallEnded(0)]
    outputs += [CallStarted(1, "note"), CallArguments(1, '{"input": "a '), CallArguments(1, '\\n🐟"}')]
    for rest, text in ([CallEnded(1)], "a \n🐟"), ([], "a \n🐟"):
        encoder = reply(custom_tools=frozenset({"note"}))
        _, _, opening, *following = deltas(encoder, *outputs, *rest)
        (call,) = opening["tool_calls"]
        assert (call["index"], call["type"], call["custom"]) == (1, "custom", {"name": "note", "input": ""})
        pieces = [{"tool_calls": [{"index": 1, "custom": {"input": piece}}]} for piece in ("a ", "\n🐟")]
        assert following == pieces
        plain, custom = message(encoder, *outputs, *rest)["tool_calls"]
        assert plain["function"] == {"name": "read", "arguments": "{}"}
        assert (custom["type"], custom["custom"]) == ("custom", {"name": "note", "input": text})


def test_the_text_of_a_custom_call_that_is_cut_is_shown_as_far_as_it_came():
    cut = Finished("length", USAGE)
    encoder = reply(custom_tools=frozenset({"note"}))
    outputs = [CallStarted(0, "note"), CallArguments(0, '{"input": "ha')]
    _, delta = deltas(encoder, *outputs, end=cut)
    assert delta == {"tool_calls": [{"index": 0, "custom": {"input": "ha"}}]}
    (call,) = message(encoder, *outputs, end=cut)["tool_calls"]
    assert call["custom"] == {"name": "note", "input": "ha"}


def test_a_call_without_arguments_is_complete_json_in_both_forms():
    outputs = [CallStarted(0, "now"), CallArguments(0, "{}"), CallEnded(0)]
    (call,) = message(reply(), *outputs)["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
    parts = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas(reply(), *outputs)]
    assert "".join(parts) == "{}"


def test_a_call_that_was_cut_off_is_shown_as_far_as_it_came():
    outputs = [CallStarted(0, "write"), CallArguments(0, '{"text": "half')]
    cut = Finished("length", USAGE)
    (call,) = message(reply(), *outputs, end=cut)["tool_calls"]
    assert call["function"] == {"name": "write", "arguments": '{"text": "half'}
    assert whole(reply(), list(outputs), cut)["choices"][0]["finish_reason"] == "length"
    (bare,) = message(reply(), CallStarted(0, "write"), end=cut)["tool_calls"]
    assert bare["function"] == {"name": "write", "arguments": ""}


def test_arguments_go_to_the_call_of_their_index():
    outputs = [
        CallStarted(0, "a"),
        CallArguments(0, '{"n": 1}'),
        CallEnded(0),
        CallStarted(1, "b"),
        CallArguments(1, '{"n": '),
        CallArguments(1, "2}"),
        CallEnded(1),
    ]
    calls = message(reply(), *outputs)["tool_calls"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == [
        ("a", '{"n": 1}'),
        ("b", '{"n": 2}'),
    ]
    indexes = [delta["tool_calls"][0]["index"] for delta in deltas(reply(), *outputs)]
    assert indexes == [0, 0, 1, 1, 1]


def test_calls_of_one_reply_and_of_others_have_ids_of_their_own():
    def ids(encoder: ChatReply) -> list[str]:
        return [row["id"] for row in message(encoder, CallStarted(0, "a"), CallStarted(1, "a"))["tool_calls"]]

    call_ids = [row for _ in range(200) for row in ids(reply())]
    assert len(set(call_ids)) == 400
    assert all(re.fullmatch(r"[A-Za-z0-9]+", row) for row in call_ids)


def test_reasoning_is_streamed_under_the_name_that_clients_read():
    assert deltas(reply(), Reasoning("Hm"), Reasoning(" 🐟"), Content("Yes.")) == [
        {"reasoning_content": "Hm"},
        {"reasoning_content": " 🐟"},
        {"content": "Yes."},
    ]


@pytest.mark.parametrize("outputs", [[], [Content("")], [Content("Hi")], [CallStarted(0, "a")]], ids=str)
def test_a_reply_without_reasoning_or_calls_has_no_member_for_them(outputs):
    sent = message(reply(), *outputs, end=DONE)
    assert {"role", "content", "refusal"} <= sent.keys()
    assert "reasoning" not in sent
    assert "reasoning_content" not in sent
    assert ("tool_calls" in sent) == any(isinstance(output, CallStarted) for output in outputs)


def test_a_sign_of_life_between_two_pieces_changes_nothing():
    encoder = reply()
    frame = encoder.keep_alive()
    assert isinstance(frame.data, dict)
    assert frame.data["choices"] == [{"index": 0, "delta": {"annotations": []}, "finish_reason": None}]
    assert frame.data["id"] == encoder.id


def test_what_was_asked_for_stands_beside_the_delta_of_every_event():
    outputs: list[Output] = [
        Reasoning("a", tokens=(0, 1), logprobs=(scored(0), scored(1))),
        CallStarted(0, "read", tokens=(2,), logprobs=(scored(2),)),
        CallArguments(0, "{}"),
        CallEnded(0, tokens=(3,), logprobs=(scored(3),)),
    ]
    chunks = streamed(reply(with_token_ids=True, with_logprobs=True), outputs, CALLED)
    choices = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert [choice["token_ids"] for choice in choices] == [[0, 1], [2], [], [3]]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [2, 1, 0, 1]
    assert [list(choice["delta"]) for choice in choices] == [
        ["reasoning_content"],
        ["tool_calls"],
        ["tool_calls"],
        [],
    ]


def test_nothing_stands_beside_the_delta_that_was_not_asked_for():
    chunks = streamed(reply(), [Content("a", tokens=(0,), logprobs=(scored(0),))], DONE)
    assert all(chunk["choices"][0].keys() == {"index", "delta", "finish_reason"} for chunk in chunks)


def read(encoder: ChatReply, outputs: list[Output], end: Finished) -> Any:
    """The reply that the stream tells."""
    return completions.read([*streamed(encoder, outputs, end), wire.DONE]).body


def test_texts_around_a_call_are_lines_of_their_own_streamed_and_whole():
    """Clients show one text: of `I look.Then write.` nobody sees where the call stood, and fences merge."""
    call = [CallStarted(0, "read"), CallArguments(0, "{}"), CallEnded(0)]
    outputs = [
        Content("I "),
        Content("look."),
        *call,
        Reasoning("Hm."),
        Content("Then"),
        Content(" write."),
    ]
    encoder = reply()
    text = "".join(delta.get("content") or "" for delta in deltas(encoder, *outputs))
    assert text == message(encoder, *outputs)["content"] == "I look.\nThen write."
    assert message(encoder, *call, Content("Then."))["content"] == "Then."
    echo = ReplyEcho()
    for output in outputs:
        echo.add(output)
    spellings = [spelling.content for spelling in echo.messages()]
    assert text in spellings, "so what comes back is known"
    assert "I look.\n\nThen write." in spellings, "as OpenClaw puts the two blocks together"


@given(reply_=chat_replies, asked=st.booleans())
def test_what_has_piled_up_may_be_sent_as_one(reply_, asked):
    outputs, end = reply_
    encoder = reply(with_token_ids=asked, with_logprobs=asked)
    together = list(merge_adjacent(outputs))
    assert len(together) <= len(outputs)
    assert read(encoder, together, end) == read(encoder, outputs, end)


@given(reply_=chat_replies)
def test_a_stream_keeps_the_grammar_and_says_what_the_whole_reply_says(reply_):
    outputs, end = reply_
    encoder = reply()
    assert read(encoder, outputs, end) == whole(encoder, outputs, end)
