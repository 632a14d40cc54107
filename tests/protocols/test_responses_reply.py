"""A response says the same whether it is streamed or not, in events that are where they belong."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses as types

from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    FinishReason,
    Output,
    Reasoning,
)
from start_llm.protocols.base import SSEFrame
from start_llm.protocols.responses.create import parse
from start_llm.protocols.responses.response_encoding import ResponseReply
from tests.grammar.responses import Event, put_together
from tests.protocols.helpers import CONTEXT, USAGE, body, chat_replies, reasoning_in

TOOLS = [
    {"type": "function", "name": "read"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]},
    {"type": "custom", "name": "note"},
]
FORMS = st.sampled_from([{}, {"reasoning": {"summary": "auto"}}])


def reply(**fields: Any) -> ResponseReply:
    made = parse(body(**{"input": "hi", "tools": TOOLS, "store": False, **fields}), {}, CONTEXT).reply
    assert isinstance(made, ResponseReply)
    return made


def data(frame: SSEFrame) -> Event:
    event = json.loads(json.dumps(frame.data))
    assert event["type"] == frame.event
    return event


def streamed(encoder: ResponseReply, outputs: list[Output], end: Finished) -> list[Event]:
    frames = [*encoder.opening(7)]
    for output in outputs:
        frames += encoder.output(output)
    return [data(frame) for frame in [*frames, *encoder.closing(end)]]


def done(reason: FinishReason = "stop") -> Finished:
    return Finished(reason, USAGE)


def bare(value: Any) -> Any:
    """Without ids, times and seals, which are others each time."""
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, dict):
        return {
            name: bare(item)
            for name, item in value.items()
            if not re.search("id$|_at$|^encrypted_content$", name)
        }
    return value


@pytest.mark.thorough
@given(chat_replies, FORMS)
def test_a_stream_says_what_the_whole_reply_says(made, form):
    outputs, end = made
    response = put_together(streamed(reply(**form), outputs, end))
    assert bare(response) == bare(reply(**form).whole(outputs, end))
    texts = {"message": Content, "reasoning": Reasoning}
    for kind, event in texts.items():
        text = "".join(output.text for output in outputs if isinstance(output, event))
        items = [item for item in response["output"] if item["type"] == kind]
        assert "".join(part["text"] for item in items for part in parts(item)) == text
    calls = [output for output in outputs if isinstance(output, CallStarted)]
    assert len([item for item in response["output"] if item["type"] == "function_call"]) == len(calls)


def parts(item: Any) -> list[Any]:
    return [*item.get("summary", []), *item.get("content", [])]


def output_of(*outputs: Output, reason: FinishReason = "stop", **fields: Any) -> list[Any]:
    return put_together(streamed(reply(**fields), list(outputs), done(reason)))["output"]


def test_the_first_event_can_be_sent_before_anything_is_known():
    created, working = map(data, reply().opening(7))
    assert (created["type"], working["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["usage"] is None


def test_a_life_sign_is_an_event_with_its_number():
    encoder = reply()
    events = [*map(data, encoder.opening(7)), data(encoder.keep_alive()), data(encoder.keep_alive())]
    events += [data(frame) for frame in encoder.output(Content("Hi"))]
    events += [data(encoder.keep_alive()), *(data(frame) for frame in encoder.closing(done()))]
    assert [event["type"] for event in events[2:4]] == ["response.in_progress"] * 2
    assert put_together(events)["output"][0]["content"][0]["text"] == "Hi"


def test_usage_and_the_request_are_reported():
    response = reply(
        model="mine", instructions="Be brief.", max_output_tokens=5, metadata={"a": "b"}, temperature=0.5,
        reasoning={"effort": "low", "summary": "auto"}, parallel_tool_calls=False, prompt_cache_key="key",
    ).whole([Content("Hi")], done())  # fmt: skip
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 10,
    }
    expected = {
        "model": "mine", "instructions": "Be brief.", "max_output_tokens": 5, "metadata": {"a": "b"},
        "temperature": 0.5, "reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": False,
        "prompt_cache_key": "key", "tools": TOOLS, "tool_choice": "auto", "store": False,
        "status": "completed", "previous_response_id": None,
        "error": None, "incomplete_details": None, "object": "response",
        "text": {"format": {"type": "text"}}, "truncation": "disabled",
    }  # fmt: skip
    assert {name: response[name] for name in expected} == expected


def test_reasoning_is_sent_as_it_is_and_as_a_summary_to_those_who_ask_for_one():
    outputs = (Reasoning("Hm"), Reasoning("."), Content("Yes."))
    reasoning, text = output_of(*outputs)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    summary, _ = output_of(*outputs, reasoning={"summary": "auto"})
    assert summary["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert "content" not in summary
    assert text["content"][0]["text"] == "Yes."
    for item in (reasoning, summary):
        assert reasoning_in(item["encrypted_content"]) == "Hm."


def test_every_call_is_an_item_by_the_names_of_the_client():
    call, nested, custom = output_of(
        CallStarted(0, "read"), CallArguments(0, '{"path":  "x"'), CallArguments(0, "}"), CallEnded(0),
        CallStarted(1, "agents__close"), CallArguments(1, "{}"), CallEnded(1),
        CallStarted(2, "note"), CallArguments(2, '{"input": "a '), CallArguments(2, '\\"b\\" 🐟"}'),
        CallEnded(2),
        reason="tool_calls",
    )  # fmt: skip
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "read", '{"path":  "x"}')
    assert "namespace" not in call
    assert (nested["namespace"], nested["name"], nested["arguments"]) == ("agents", "close", "{}")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "note", 'a "b" 🐟')
    assert len({item["call_id"] for item in (call, nested, custom)}) == 3
    assert {item["status"] for item in (call, nested, custom)} == {"completed"}


@pytest.mark.parametrize("arguments", ['{"text": "x"}', '{"input": 5}', '"x"', "[]", ""])
def test_arguments_of_another_form_are_the_input_of_a_custom_call(arguments):
    (call,) = output_of(CallStarted(0, "note"), CallArguments(0, arguments), CallEnded(0))
    assert call["input"] == arguments


BUILT_IN: dict[str, Any] = {"tools": [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]}


def test_the_calls_of_tools_that_openai_defines_are_items_of_their_types():
    local, shell, patch = output_of(
        CallStarted(0, "local_shell"), CallArguments(0, '{"command": ["l'), CallArguments(0, 's"]}'),
        CallEnded(0), CallStarted(1, "shell"), CallArguments(1, '{"commands": ["ls"]}'), CallEnded(1),
        CallStarted(2, "apply_patch"), CallArguments(2, '{"type": "delete_file", "path": "a"}'), CallEnded(2),
        reason="tool_calls", **BUILT_IN,
    )  # fmt: skip
    assert (local["type"], local["action"]) == (
        "local_shell_call",
        {"type": "exec", "command": ["ls"], "env": {}},
    )
    assert (shell["type"], shell["action"]) == ("shell_call", {"commands": ["ls"]})
    assert (patch["type"], patch["operation"]) == ("apply_patch_call", {"type": "delete_file", "path": "a"})
    assert not [item for item in (local, shell, patch) if "name" in item or "arguments" in item]


@pytest.mark.parametrize("arguments", ['{"commands": ["rm', '"x"', ""])
def test_a_call_whose_arguments_are_no_object_runs_nothing(arguments):
    (call,) = output_of(CallStarted(0, "shell"), CallArguments(0, arguments), reason="length", **BUILT_IN)
    assert (call["action"], call["status"]) == ({"commands": []}, "incomplete")


@pytest.mark.parametrize(
    ("tool", "kind", "member", "lists"),
    [
        ("local_shell", types.response_output_item.LocalShellCall, "command", ["bash", "-lc", "ls -l | wc"]),
        ("shell", types.ResponseFunctionShellToolCall, "commands", ["ls -l | wc"]),
    ],
)
def test_a_text_that_the_model_writes_in_place_of_a_list_is_a_list_for_the_client(
    tool: str, kind: Any, member: str, lists: list[str]
):
    for written, expected in (("ls -l | wc", lists), (["ls", "-l"], ["ls", "-l"])):
        arguments = json.dumps({"timeout_ms": 5, member: written})
        (call,) = output_of(CallStarted(0, tool), CallArguments(0, arguments), CallEnded(0), **BUILT_IN)
        action = kind.model_validate(call).action
        assert (getattr(action, member), action.timeout_ms) == (expected, 5)


def test_the_text_of_a_custom_call_that_is_cut_is_shown_as_far_as_it_came():
    (call,) = output_of(CallStarted(0, "note"), CallArguments(0, '{"input": "a\\nb'), reason="length")
    assert (call["input"], call["status"]) == ("a\nb", "incomplete")


def test_the_text_of_a_custom_call_is_streamed_as_it_comes():
    pieces = ['{"input": "a', "b\\n", 'c"', "}"]
    outputs: list[Output] = [
        CallStarted(0, "note"),
        *(CallArguments(0, text) for text in pieces),
        CallEnded(0),
    ]
    events = streamed(reply(), outputs, done())
    deltas = [text["delta"] for text in events if text["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["a", "b\n", "c"]


def test_what_is_cut_is_incomplete():
    encoder = reply()
    events = streamed(
        encoder, [Content("So"), CallStarted(0, "read"), CallArguments(0, '{"pa')], done("length")
    )
    response = put_together(events)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    (text,) = output_of(Content("So"), reason="length")
    assert text["status"] == "incomplete"


def test_a_call_that_a_stop_string_cut_is_incomplete_too():
    (call,) = output_of(CallStarted(0, "read"), CallArguments(0, '{"pa'))
    assert call["status"] == "incomplete"


def test_a_failure_is_the_last_event():
    encoder = reply()
    events = [*map(data, encoder.opening(7)), *(data(frame) for frame in encoder.output(Content("So")))]
    failed = data(encoder.failure("The engine is gone."))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "The engine is gone."}
    assert failed["sequence_number"] == len(events)


def test_an_empty_reply_has_no_items():
    assert output_of() == output_of(Content(""), Reasoning("")) == []
