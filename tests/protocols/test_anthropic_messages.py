"""Anthropic's messages: bodies to requests, events to blocks, streamed or whole."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.chat import ChatRequest, JsonAnswer, Message, OutputConstraint, Thinking
from start_llm.core.errors import (
    BodyTooLarge,
    ContextOverflow,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RequestError,
    RequestTimeout,
)
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
from start_llm.core.ids import name_in
from start_llm.core.sampling import SamplingChoice
from start_llm.protocols.anthropic.error_bodies import anthropic_refusal
from start_llm.protocols.anthropic.messages import count_json, parse, parse_count
from start_llm.protocols.base import ParsedRequest
from start_llm.protocols.seal import Sealed
from tests.grammar.messages import put_together, without_ids
from tests.protocols.helpers import CONTEXT, USAGE, body, chat_replies, read, reasoning_in, whole

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"name": "read", "input_schema": {"type": "object"}}
USAGE_JSON = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"thinking_tokens": 2},
    "service_tier": "standard",
}
REPLY: list[Output] = [
    Content("\n"),
    Reasoning("Look "),
    Reasoning("it up."),
    Content("\n\n"),
    Content("Well"),
    Content(".\n"),
    CallStarted(0, "read"),
    CallArguments(0, '{"path": "a'),
    CallArguments(0, '.txt"}'),
    CallEnded(0),
    Content("\n"),
    CallStarted(1, "write"),
    CallArguments(1, "{}"),
    CallEnded(1),
]


def call(headers: dict[str, str] | None = None, /, **fields: Any) -> ParsedRequest:
    return parse(body(**{"messages": MESSAGES, "max_tokens": 9, **fields}), headers or {}, CONTEXT)


def request(**fields: Any) -> ChatRequest:
    parsed = call(**fields).request
    assert isinstance(parsed, ChatRequest)
    return parsed


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        call(**fields)
    return refused.value


def end(reason: FinishReason = "stop", stop: str | None = None) -> Finished:
    return Finished(reason, USAGE, stop)


def events_of(outputs: Sequence[Output], end: Finished, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, after a look at their names."""
    reply = call(**fields).reply
    frames = [*reply.opening(USAGE.prompt)]
    for output in outputs:
        frames += reply.output(output)
    frames += reply.closing(end)
    events = [read(frame) for frame in frames]
    assert [frame.event for frame in frames] == [event["type"] for event in events]
    return events


# --------------------------------------------------------------------------------------------------- requests


def test_the_least_request_leaves_everything_to_the_server():
    parsed = call()
    assert isinstance(parsed.request, ChatRequest)
    assert parsed.request.messages == (Message(role="user", content="hi"),)
    assert parsed.request.options.max_tokens == 9
    assert parsed.request.options.sampling == SamplingChoice()
    assert parsed.request.thinking == Thinking()
    assert not parsed.stream


def test_fields_of_the_reply():
    fields = {"temperature": 0.5, "top_p": 0.8, "top_k": 7, "stop_sequences": ["END", "\n\n"], "seed": 3}
    options = request(**fields).options
    assert options.sampling == SamplingChoice(temperature=0.5, top_p=0.8, top_k=7)
    assert (options.stop, options.seed) == (("END", "\n\n"), 3)
    assert call(stream=True).stream


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, Thinking(on=True, budget=2048)),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, Thinking(on=True)),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            Thinking(on=False, effort="high"),
        ),
        ({"output_config": {"effort": "low"}}, Thinking(on=True, effort="low")),
        ({"output_config": {"effort": "max"}}, Thinking(on=True, effort="xhigh")),
    ],
    ids=str,
)
def test_thinking(fields, thinking):
    assert request(**fields).thinking == thinking


def test_a_session_is_found_in_the_metadata_and_in_a_header():
    user = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s1"})
    assert request(metadata={"user_id": user}).session_id == "s1"
    parsed = call({"x-claude-code-session-id": "s2"}).request
    assert parsed.session_id == "s2"


@pytest.mark.parametrize("kind", ["auto", "any", "tool", "of_tomorrow"])
def test_tools_are_offered_whatever_is_demanded_of_them(kind):
    choice = {"type": kind, "name": "read", "disable_parallel_tool_use": True}
    assert len(request(tools=[TOOL], tool_choice=choice).tools) == 1


def test_calls_can_be_forbidden_or_demanded_and_the_tools_stay():
    late = {**TOOL, "name": "late", "defer_loading": True}
    asked = {
        kind: request(tools=[TOOL, late], tool_choice={"type": kind, "name": "read"})
        for kind in ("auto", "none", "any", "tool")
    }
    assert {(len(parsed.tools), len(parsed.late_tools)) for parsed in asked.values()} == {(1, 1)}
    assert [parsed.form.calls for parsed in asked.values()] == ["may", "none", "must", "must"]
    assert asked["tool"].form.tools == {"read"}


def test_one_call_can_be_the_limit():
    for kind in ("auto", "any", "tool"):
        choice = {"type": kind, "name": "read", "disable_parallel_tool_use": True}
        assert request(tools=[TOOL], tool_choice=choice).form.one_call
    assert not request(tools=[TOOL], tool_choice={"type": "any"}).form.one_call


def test_a_tool_that_runs_elsewhere_cannot_be_demanded_and_an_unknown_one_is_refused():
    search = {"type": "web_search_20250305", "name": "web_search"}
    choice = {"type": "tool", "name": "web_search"}
    assert request(tools=[search, TOOL], tool_choice=choice).form == OutputConstraint()
    assert request(tools=[search], tool_choice={"type": "any"}).form == OutputConstraint()
    with pytest.raises(InvalidRequest) as refused:
        request(tools=[TOOL], tool_choice={"type": "tool", "name": "erase"})
    assert refused.value.param == "tool_choice.name"


@pytest.mark.parametrize("field", ["output_config.format", "output_format"])
def test_a_schema_for_the_answer_arrives_by_either_name(field):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    asked = {"output_config": {"format": form}} if "." in field else {"output_format": form}
    answer = JsonAnswer(schema={"type": "object"}, field=f"{field}.schema")
    assert request(**asked).form == OutputConstraint(answer=answer)
    del form["schema"]
    with pytest.raises(InvalidRequest) as refused:
        request(**asked)
    assert refused.value.param == f"{field}.schema"


def test_what_claude_code_sends_beside_is_ignored():
    beside = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "format": {"type": "of_tomorrow"}},
        "mcp_servers": [],
        "service_tier": "auto",
        "container": None,
        "betas": ["x"],
        "speed": "fast",
    }
    assert request(**beside) == request(output_config={"effort": "high"})


def test_reasoning_of_ours_is_opened():
    sealed = CONTEXT.seal.seal("\nHm.\n", "", CONTEXT.tenant)
    block = {"type": "thinking", "thinking": "", "signature": sealed}
    (_, reply) = request(messages=[*MESSAGES, {"role": "assistant", "content": [block]}]).messages
    assert reply.reasoning == "\nHm.\n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"thinking": 5}, "thinking"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": {}}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"model": 5}, "model"),
    ],
    ids=str,
)
def test_the_field_at_fault_is_named(fields, param):
    error = refusal(**fields)
    assert error.param == param
    assert param in error.message


WRONG = {"boolean": True, "number": 7.5, "string": "x", "array": [[]], "object": {"x": 1}}
RIGHT = {
    "model": "string",
    "messages": "",
    "max_tokens": "",
    "system": "string",
    "stream": "boolean",
    "stop_sequences": "string",
    "temperature": "",
    "top_p": "",
    "top_k": "",
    "tools": "",
    "tool_choice": "object",
    "thinking": "boolean string object",
    "output_config": "object",
    "chat_template_kwargs": "object",
}
"""Types that a field may have; a value of another one, or a number that it cannot be, is refused."""


@pytest.mark.parametrize("name", RIGHT)
def test_every_wrong_type_is_refused_and_named(name):
    for kind, value in WRONG.items():
        if kind not in RIGHT[name].split():
            error = refusal(**{name: value})
            assert (error.param or "").startswith(name), kind


_texts = st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "document", "ours", ""])
_words = st.sampled_from(
    "type text content source data thinking signature input name id tool_use_id is_error role".split()
)
_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | _texts,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(_words, inside, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(["user", "assistant", "system"]), _junk, _junk, _junk)
def test_any_junk_is_read_or_refused(role, content, system, tool):
    messages = [{"role": role, "content": content}]
    try:
        call(messages=messages, system=system, tools=[tool])
    except InvalidRequest as error:
        assert error.param


def test_a_missing_limit_is_reported_as_anthropic_does():
    assert refusal(max_tokens=None).message == "max_tokens: Field required"


def test_what_is_counted_is_what_would_be_asked():
    fields = {"system": "Be brief.", "messages": MESSAGES, "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted, asked = parse_count(body(**fields), {}, CONTEXT).request, request(**fields)
    assert isinstance(counted, ChatRequest)
    assert (counted.messages, counted.tools, counted.thinking) == (
        asked.messages,
        asked.tools,
        asked.thinking,
    )
    assert count_json(7) == {"input_tokens": 7}


# ---------------------------------------------------------------------------------------------------- replies


def test_a_reply_in_blocks():
    answer = whole(call(model="claude-x").reply, REPLY, end("tool_calls"))
    signature = answer["content"][0]["signature"]
    assert CONTEXT.seal.open(signature, CONTEXT.tenant) == Sealed("Look it up.", name_in(answer["id"]))
    assert CONTEXT.seal.open(signature, b"another") is None
    message = without_ids(answer)
    reasoning, text, read, write = message["content"]
    assert reasoning["thinking"] == "Look it up."
    assert text == {"type": "text", "text": "\n\nWell.\n"}
    assert read == {"type": "tool_use", "name": "read", "input": {"path": "a.txt"}}
    assert write == {"type": "tool_use", "name": "write", "input": {}}
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "claude-x")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == USAGE_JSON


def test_a_stream_begins_with_what_is_known():
    start = events_of(REPLY, end())[0]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    usage = start["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (7, 0, 0)


@given(chat_replies)
def test_a_stream_says_what_the_whole_reply_says(made):
    outputs, ending = made
    streamed = without_ids(put_together(events_of(outputs, ending)))
    assert streamed == without_ids(whole(call().reply, outputs, ending))


@given(chat_replies)
def test_nothing_is_lost_but_white_space_around_blocks(made):
    outputs, ending = made
    content = whole(call().reply, outputs, ending)["content"]
    text = "".join(block["text"] for block in content if block["type"] == "text")
    assert text.split() == "".join(output.text for output in outputs if isinstance(output, Content)).split()
    reasoning = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    assert reasoning == "".join(output.text for output in outputs if isinstance(output, Reasoning))
    names = [output.name for output in outputs if isinstance(output, CallStarted)]
    assert [block["name"] for block in content if block["type"] == "tool_use"] == names
    assert all(block["text"].strip() for block in content if block["type"] == "text")


@pytest.mark.parametrize(
    ("ending", "reported"),
    [
        (end("stop"), ("end_turn", None)),
        (end("length"), ("max_tokens", None)),
        (end("tool_calls"), ("tool_use", None)),
        (end("stop", "END"), ("stop_sequence", "END")),
        (end("tool_calls", "END"), ("tool_use", None)),
    ],
    ids=str,
)
def test_why_a_reply_ended(ending, reported):
    message = whole(call().reply, REPLY, ending)
    assert (message["stop_reason"], message["stop_sequence"]) == reported
    (delta,) = (event for event in events_of(REPLY, ending) if event["type"] == "message_delta")
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == reported
    assert {**delta["usage"], "service_tier": "standard"} == USAGE_JSON


def test_a_call_that_was_cut_keeps_what_was_written():
    cut: list[Output] = [CallStarted(0, "read"), CallArguments(0, '{"path": "a')]
    (block,) = whole(call().reply, cut, end("length"))["content"]
    assert block["input"] == {"raw": '{"path": "a'}
    assert events_of(cut, end("length"))[-3] == {"type": "content_block_stop", "index": 0}


def test_reasoning_that_was_cut_is_signed_too():
    (block,) = whole(call().reply, [Reasoning("Hm")], end("length"))["content"]
    assert reasoning_in(block["signature"]) == "Hm"


def test_reasoning_that_is_not_to_be_shown_is_in_its_signature_alone():
    asked = {"thinking": {"type": "adaptive", "display": "omitted"}}
    streamed = put_together(events_of(REPLY, end(), **asked))
    for message in (streamed, whole(call(**asked).reply, REPLY, end())):
        reasoning = message["content"][0]
        assert reasoning["thinking"] == ""
        assert reasoning_in(reasoning["signature"]) == "Look it up."
    assert refusal(thinking={"type": "adaptive", "display": 5}).param == "thinking.display"


def test_with_a_limit_of_no_tokens_nothing_is_said():
    asked = call(max_tokens=0)
    assert asked.request.options.is_prewarm
    assert whole(asked.reply, [], end("length"))["content"] == []
    kinds = [event["type"] for event in events_of([], end("length"), max_tokens=0)]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_a_sign_of_life_is_an_event():
    frame = call().reply.keep_alive()
    assert (frame.event, frame.data) == ("ping", {"type": "ping"})


# ----------------------------------------------------------------------------------------------------- errors


def test_a_failure_in_a_stream():
    reply = call().reply
    frame = reply.failure("The engine failed.")
    assert frame.event == "error"
    assert isinstance(frame.data, dict)
    assert (frame.data["type"], frame.data["request_id"]) == ("error", reply.id)
    assert frame.data["error"] == {"type": "api_error", "message": "The engine failed."}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (MethodNotAllowed("x"), "invalid_request_error"),
        (NotFound("x"), "not_found_error"),
        (RequestTimeout("x"), "timeout_error"),
        (BodyTooLarge("x"), "request_too_large"),
        (InternalError("x"), "api_error"),
        (Overloaded("x"), "overloaded_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_have_anthropics_types(error: RequestError, kind):
    answer = anthropic_refusal(error, "req_1")
    assert answer == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "req_1"}


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know():
    error = ContextOverflow(prompt_tokens=205_000, window=200_001, param="messages")
    answer = anthropic_refusal(error, "req_1")["error"]
    assert answer == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 205000 tokens > 200000 maximum",
    }
