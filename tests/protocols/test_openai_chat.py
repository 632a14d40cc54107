"""Chat completions: bodies to requests, events to chunks or to one body that says the same."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.chat import ChatRequest, JsonAnswer, Message, OutputConstraint, Thinking, ToolCall
from start_llm.core.errors import InvalidRequest
from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    Output,
    Reasoning,
)
from start_llm.core.sampling import SamplingChoice
from start_llm.protocols.base import ParsedRequest, Reply, SSEFrame
from start_llm.protocols.openai.chat_completions import parse
from tests.protocols.helpers import (
    CONTEXT,
    TOOL,
    USAGE,
    body,
    chat_replies,
    chunks,
    events,
    read,
    replies,
    streamed,
    whole,
)

MESSAGES = [{"role": "user", "content": "hi"}]
USAGE_JSON = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
CALLS: list[Output] = [
    Reasoning("Look it up.", tokens=(1, 2)),
    Content("Well.", tokens=(3,)),
    CallStarted(0, "read", tokens=(4,)),
    CallArguments(0, '{"path": "a', tokens=(5,)),
    CallArguments(0, '.txt"}'),
    CallEnded(0, tokens=(6,)),
    CallStarted(1, "write"),
    CallArguments(1, "{}"),
    CallEnded(1),
]


def call(headers: dict[str, str] | None = None, /, **fields: Any) -> ParsedRequest:
    return parse(body(**{"messages": MESSAGES, **fields}), headers or {}, CONTEXT)


def request(**fields: Any) -> ChatRequest:
    parsed = call(**fields).request
    assert isinstance(parsed, ChatRequest)
    return parsed


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        call(**fields)
    return refused.value


def test_the_least_request_leaves_everything_to_the_server():
    parsed = call()
    assert parsed.request == ChatRequest(messages=(Message(role="user", content="hi"),))
    assert not parsed.stream


def test_null_is_absent_for_every_field():
    names = """
        model stream stream_options max_tokens max_completion_tokens temperature top_p top_k min_p seed stop
        repetition_penalty repetition_context_size presence_penalty frequency_penalty logit_bias logprobs
        top_logprobs n tools tool_choice parallel_tool_calls response_format chat_template_kwargs adapter hlg
        return_token_ids session_id metadata thinking thinking_budget enable_thinking reasoning
        reasoning_effort output_config extra_body
    """
    assert call(**dict.fromkeys(names.split())).request == call().request


def test_unknown_fields_of_any_kind_change_nothing():
    strange = {
        "store": True,
        "thinking": {"x": [1]},
        "user": 5,
        "betas": "x",
        "service_tier": [],
        "extra_body": 1,
    }
    assert call(**strange).request == call().request


def test_every_generation_field_arrives():
    options = request(
        max_tokens=5,
        stop=["a", "b", "a"],
        temperature=0.5,
        top_p=0.75,
        top_k=3,
        min_p=0.25,
        repetition_penalty=1.5,
        repetition_context_size=9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100, "8": 2.5, "9": None},
        seed=-3,
        logprobs=True,
        top_logprobs=2,
    ).options
    assert options.max_tokens == 5
    assert options.stop == ("a", "b")
    assert options.sampling == SamplingChoice(
        temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, repetition_penalty=1.5, repetition_context_size=9
    )
    assert (options.presence_penalty, options.frequency_penalty) == (1, -1)
    assert options.logit_bias == {7: -100, 8: 2.5}
    assert (options.seed, options.top_logprobs) == (-3, 2)


def test_max_completion_tokens_wins():
    assert request(max_tokens=5, max_completion_tokens=9).options.max_tokens == 9
    assert request(max_completion_tokens=9).options.max_tokens == 9
    assert request(max_tokens=5, max_completion_tokens=None).options.max_tokens == 5


def test_a_value_of_zero_is_said_and_not_absent():
    sampling = request(temperature=0, top_p=0, top_k=0, min_p=0).options.sampling
    assert sampling == SamplingChoice(temperature=0, top_p=0, top_k=0, min_p=0)
    assert request(seed=0).options.seed == 0


def test_log_probabilities_are_given_only_if_they_are_asked_for():
    assert request(top_logprobs=5).options.top_logprobs is None
    assert request(logprobs=True).options.top_logprobs == 0
    assert request(logprobs=False, top_logprobs=5).options.top_logprobs is None


def test_the_session_comes_from_body_or_headers():
    assert request(session_id="abc").session_id == "abc"
    parsed = call({"x-session-id": "def"}).request
    assert parsed.session_id == "def"


READ = {"type": "function", "function": {"name": "read"}}
WRITE = {"type": "function", "function": {"name": "write"}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        ("auto", OutputConstraint()),
        ("none", OutputConstraint(calls="none")),
        ("required", OutputConstraint(calls="must")),
        (READ, OutputConstraint(calls="must", tools=frozenset({"read"}))),
        (allowed("auto", READ), OutputConstraint(tools=frozenset({"read"}))),
        (
            allowed("required", READ, WRITE),
            OutputConstraint(calls="must", tools=frozenset({"read", "write"})),
        ),
    ],
    ids=lambda value: "" if isinstance(value, OutputConstraint) else str(value),
)
def test_what_may_be_called_arrives_and_the_tools_reach_the_template(choice, form):
    tools = [TOOL, WRITE | {"defer_loading": True}]
    asked = request(tools=tools, tool_choice=choice)
    assert (asked.tools, asked.late_tools, asked.form) == ((TOOL,), (WRITE,), form)


SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("tools", "choice", "form"),
    [
        ([TOOL, SEARCH], {"type": "web_search"}, OutputConstraint()),
        ([SEARCH], "required", OutputConstraint()),
        ([TOOL, SEARCH], allowed("required", SEARCH), OutputConstraint(calls="none")),
    ],
    ids=str,
)
def test_a_demanded_tool_that_runs_elsewhere_is_answered_in_words(tools, choice, form):
    parsed = call(tools=tools, tool_choice=choice)
    assert parsed.unavailable.startswith(
        "The tool web_search is not available here: it runs on OpenAI's servers."
    )
    assert isinstance(parsed.request, ChatRequest)
    assert parsed.request.form == form


@pytest.mark.parametrize(
    ("tools", "choice", "form"),
    [
        ([TOOL, SEARCH], "required", OutputConstraint(calls="must")),
        ([TOOL, SEARCH], "auto", OutputConstraint()),
        (
            [TOOL, SEARCH],
            allowed("required", SEARCH, READ),
            OutputConstraint(calls="must", tools=frozenset({"read"})),
        ),
        ([TOOL, SEARCH], allowed("auto", SEARCH), OutputConstraint(calls="none")),
    ],
    ids=str,
)
def test_beside_a_tool_that_runs_elsewhere_the_others_are_called(tools, choice, form):
    parsed = call(tools=tools, tool_choice=choice)
    assert not parsed.unavailable
    assert isinstance(parsed.request, ChatRequest)
    assert parsed.request.form == form


def test_one_call_can_be_the_limit():
    assert request(tools=[TOOL], parallel_tool_calls=False).form == OutputConstraint(one_call=True)
    assert request(tools=[TOOL], parallel_tool_calls=True).form == OutputConstraint()


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, JsonAnswer(schema={"type": "object"}, field="response_format")),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "array"}},
            },
            JsonAnswer(schema={"type": "array"}, field="response_format.json_schema.schema", is_strict=True),
        ),
    ],
    ids=str,
)
def test_the_form_of_an_answer_arrives(form, answer):
    assert request(response_format=form).form == OutputConstraint(answer=answer)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "read"}}}, "tool_choice.type"),
        ({"tool_choice": WRITE}, "tool_choice.name"),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
    ],
    ids=str,
)
def test_a_form_that_makes_no_sense_is_refused_by_name(fields, param):
    error = refusal(tools=[TOOL], **fields)
    assert (error.param, error.status) == (param, 400)
    assert f"'{param}' " in error.message


SAY = {"type": "custom", "custom": {"name": "say", "description": "Says it."}}


def with_format(form: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "say", "format": form}}


def test_a_custom_tool_has_one_text_and_is_chosen_by_its_name():
    choice = {"type": "custom", "custom": {"name": "say"}}
    asked = request(tools=[READ, SAY], tool_choice=choice)
    function: Any = asked.tools[1]["function"]
    assert (function["name"], function["description"]) == ("say", "Says it.")
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert asked.form == OutputConstraint(calls="must", tools=frozenset({"say"}))
    assert asked.grammars == ()
    assert request(tools=[READ, SAY], tool_choice=allowed("auto", READ, choice)).form.tools == {"read", "say"}


def test_the_grammar_of_a_custom_tool_arrives():
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    (grammar,) = request(tools=[with_format(form)]).grammars
    assert (grammar.tool, grammar.syntax, grammar.definition) == ("say", "regex", "a+")
    assert grammar.field == "tools[0].custom.format.grammar.definition"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name"),
        (with_format({"type": "xml"}), "tools[0].custom.format.type"),
        (with_format({"type": "grammar", "grammar": {}}), "tools[0].custom.format.grammar.syntax"),
    ],
    ids=str,
)
def test_the_field_of_a_custom_tool_at_fault_is_named(tool, param):
    assert refusal(tools=[tool]).param == param


def test_the_call_of_a_custom_tool_comes_back_with_its_text():
    sent = {"id": "c1", "type": "custom", "custom": {"name": "say", "input": "a\nb"}}
    (message,) = request(messages=[{"role": "assistant", "content": "", "tool_calls": [sent]}]).messages
    assert message.tool_calls == (ToolCall("c1", "say", {"input": "a\nb"}),)


def test_what_is_said_about_thinking_arrives():
    assert request(reasoning_effort="low", thinking_budget=9).thinking == Thinking(
        on=True, effort="low", budget=9
    )
    assert request(thinking={"type": "disabled"}).thinking == Thinking(on=False)


def test_template_options_are_forwarded_but_for_those_that_the_server_decides():
    asked = request(chat_template_kwargs={"enable_thinking": False, "any": {"deep": [1]}})
    assert asked.template_options == {"any": {"deep": [1]}}
    assert asked.thinking == Thinking(on=False), "the server sets it, under the name that the template knows"
    reserved = (
        "tools messages add_generation_prompt tokenize chat_template strftime_now continue_final_message"
    )
    for name in reserved.split():
        error = refusal(chat_template_kwargs={"enable_thinking": True, name: 1})
        assert error.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("adapter", 3),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(field, value):
    error = refusal(**{field: value})
    assert (error.param, error.status) == (field, 400)
    assert f"'{field}' " in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"tool_choice": "auto", "response_format": {"type": "text"}},
        {"adapter": "", "hlg": {}},
        {"parallel_tool_calls": True},
    ],
)
def test_values_that_ask_for_nothing_unbuilt_are_taken(fields):
    assert call(**fields).request == call().request


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
        ({"max_tokens": -2, "max_completion_tokens": 5}, "max_tokens"),
        ({"temperature": 5.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": 0.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1001}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"tools": {}}, "tools"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"enable_thinking": "sometimes"}, "enable_thinking"),
        ({"thinking_budget": 1.5}, "thinking_budget"),
    ],
)
def test_the_field_at_fault_is_named(fields, param):
    assert refusal(**fields).param == param


# ------------------------------------------------------------------------------------------------- encoding


def test_the_requested_name_is_echoed_and_the_loaded_one_is_the_fingerprint():
    for fields, name in (({"model": "gpt-5"}, "gpt-5"), ({}, "lab/loaded"), ({"model": ""}, "lab/loaded")):
        reply = call(**fields).reply
        outputs, end = events([0])
        for answer in [*streamed(reply, outputs, end), whole(reply, outputs, end)]:
            assert (answer["model"], answer["system_fingerprint"]) == (name, "lab/loaded")


@pytest.mark.thorough
def test_ids_are_unique_and_only_letters_and_digits_after_the_prefix():
    ids = [whole(call().reply, [], Finished("stop", USAGE))["id"] for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch(r"chatcmpl-[A-Za-z0-9]{24}", reply_id) for reply_id in ids)


def test_a_whole_reply_has_the_shape_of_the_protocol():
    reply = call().reply
    outputs: list[Output] = [Content("Hello", tokens=(0,)), Content(" you", tokens=(1, 9))]
    answer = whole(reply, outputs, Finished("length", USAGE))
    message = {"role": "assistant", "content": "Hello you", "refusal": None}
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {"index": 0, "message": message, "finish_reason": "length", "logprobs": None}
    ]
    assert answer["usage"] == USAGE_JSON
    assert isinstance(answer["created"], int)


def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_the_usage():
    outputs: list[Output] = [Content("Hello", tokens=(0,))]
    first, text, last = streamed(call(stream=True).reply, outputs, Finished("stop", USAGE))
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ]
    assert text["choices"] == [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert last["usage"] == USAGE_JSON
    assert "usage" not in first
    assert "usage" not in text
    assert first["id"] == text["id"] == last["id"]
    assert {chunk["object"] for chunk in (first, text, last)} == {"chat.completion.chunk"}


def test_the_role_comes_with_the_first_text_or_sign_of_life_and_not_before():
    """Tools that measure take the first chunk for the first token."""
    role = {"role": "assistant", "content": ""}
    ways: dict[str, Callable[[Reply], Iterable[SSEFrame]]] = {
        "text": lambda reply: reply.output(Content("Hello")),
        "sign of life": lambda reply: [reply.keep_alive()],
        "end": lambda reply: reply.closing(Finished("stop", USAGE)),
    }
    for way in ways.values():
        reply = call(stream=True).reply
        assert list(reply.opening(7)) == []
        assert list(reply.output(Content(""))) == []
        first, *others = [read(frame) for frame in way(reply) if frame.data != "[DONE]"]
        assert first["choices"][0]["delta"] == role
        later = [*others, read(reply.keep_alive())]
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in later)


def test_usage_comes_in_a_chunk_of_its_own_for_those_who_ask():
    reply = call(stream=True, stream_options={"include_usage": True}).reply
    *others, usage = streamed(reply, [Content("Hello", tokens=(0,))], Finished("stop", USAGE))
    assert (usage["choices"], usage["usage"]) == ([], USAGE_JSON)
    assert not any("usage" in chunk for chunk in others)
    assert others[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_sign_of_life_is_a_chunk_without_content():
    frame = call().reply.keep_alive()
    assert isinstance(frame.data, dict)
    assert frame.data["choices"] == [{"index": 0, "delta": {"annotations": []}, "finish_reason": None}]


def test_a_failure_is_one_error_frame():
    frame = call().reply.failure("The engine failed.")
    assert frame.data == {
        "error": {"message": "The engine failed.", "type": "server_error", "param": None, "code": None}
    }


def test_tokens_without_text_make_no_chunk_unless_they_are_asked_for():
    for silent in (Content("", tokens=(9,)), CallEnded(0, tokens=(9,))):
        assert list(call().reply.output(silent)) == []
        (frame,) = call(return_token_ids=True).reply.output(silent)
        assert isinstance(frame.data, dict)
        assert frame.data["choices"] == [{"index": 0, "delta": {}, "finish_reason": None, "token_ids": [9]}]


def test_an_empty_reply_is_an_empty_string_and_never_null():
    reply = call().reply
    silent: list[list[Output]] = [[Content("", tokens=(9,))], CALLS[2:], CALLS[:1]]
    for nothing in silent:
        message = whole(reply, nothing, Finished("stop", USAGE))["choices"][0]["message"]
        assert message["content"] == ""


def test_a_whole_reply_holds_the_reasoning_under_both_names_and_the_calls():
    (choice,) = whole(call().reply, CALLS, Finished("tool_calls", USAGE))["choices"]
    first, second = choice["message"]["tool_calls"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Well.",
        "refusal": None,
        "reasoning_content": "Look it up.",
        "reasoning": "Look it up.",
        "tool_calls": [first, second],
    }
    assert (first["type"], first["function"]) == (
        "function", {"name": "read", "arguments": '{"path": "a.txt"}'},
    )  # fmt: skip
    assert (second["type"], second["function"]) == ("function", {"name": "write", "arguments": "{}"})
    assert choice["finish_reason"] == "tool_calls"


def test_a_stream_gives_reasoning_and_calls_in_deltas_of_their_own():
    sent = streamed(call().reply, CALLS, Finished("tool_calls", USAGE))
    deltas = [chunk["choices"][0]["delta"] for chunk in sent[1:]]
    ids = [delta["tool_calls"][0]["id"] for delta in (deltas[2], deltas[5])]
    assert deltas == [
        {"reasoning_content": "Look it up."},
        {"content": "Well."},
        opening_of_call(0, ids[0], "read"),
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"path": "a'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '.txt"}'}}]},
        opening_of_call(1, ids[1], "write"),
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert sent[-1]["choices"][0]["finish_reason"] == "tool_calls"


def opening_of_call(index: int, call_id: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}


def test_the_ids_of_calls_are_unique_and_only_letters_and_digits():
    ids = [
        item["id"]
        for _ in range(500)
        for item in whole(
            call().reply, [CallStarted(0, "a"), CallStarted(1, "b")], Finished("tool_calls", USAGE)
        )["choices"][0]["message"]["tool_calls"]
    ]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch(r"call[A-Za-z0-9]{24}", item) for item in ids)


def put_together(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the deltas of a stream."""
    message: dict[str, Any] = {"role": "assistant", "refusal": None}
    message["content"] = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", [])):
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message |= {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    return message | ({"tool_calls": calls} if calls else {})


@given(reply=st.one_of(replies, chat_replies))
def test_a_stream_and_a_whole_reply_say_the_same(reply):
    outputs, end = reply
    encoder = call(logprobs=True, top_logprobs=2, return_token_ids=True).reply
    parts = [chunk["choices"][0] for chunk in streamed(encoder, outputs, end)]
    answer = whole(encoder, outputs, end)
    (choice,) = answer["choices"]
    assert put_together([part["delta"] for part in parts]) == choice["message"]
    assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
    scored = [entry for part in parts for entry in part.get("logprobs", {}).get("content", [])]
    assert scored == choice["logprobs"]["content"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"] == end.reason
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]


@given(reply=replies)
def test_plain_chunks_hold_the_text_and_nothing_empty(reply):
    outputs, end = reply
    encoder = call().reply
    sent = [frame for output in outputs for frame in encoder.output(output)]
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks([*sent, *encoder.closing(end)])[:-1]]
    assert all(texts)
    assert "".join(texts) == whole(encoder, outputs, end)["choices"][0]["message"]["content"]


@given(reply=chat_replies)
def test_calls_that_are_complete_have_arguments_that_are_json_objects(reply):
    outputs, end = reply
    message = whole(call().reply, outputs, end)["choices"][0]["message"]
    if end.reason == "tool_calls":
        assert all(
            isinstance(json.loads(item["function"]["arguments"]), dict) for item in message["tool_calls"]
        )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_object", "schema": {"enum": ["v"]}}}, "response_format.schema"),
        ({"guided_json": {"enum": ["v"]}}, "guided_json"),
        ({"guided_json": {"enum": ["v"]}, "response_format": {"type": "text"}}, "guided_json"),
    ],
)
def test_a_schema_is_obeyed_under_the_names_of_other_servers(fields, field):
    assert request(**fields).form.answer == JsonAnswer(schema={"enum": ["v"]}, field=field)


@pytest.mark.parametrize(
    "fields", [{"guided_json": 5}, {"response_format": {"type": "json_object", "schema": 5}}]
)
def test_a_schema_of_another_type_is_refused(fields):
    assert "must be an object" in refusal(**fields).message


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("functions", [{"name": "read", "parameters": {}}], "tools"),
        ("function_call", {"name": "read"}, "tool_choice"),
        ("guided_choice", ["yes", "no"], "response_format"),
        ("guided_regex", "[0-9]+", "response_format"),
        ("guided_grammar", "root ::= 'x'", "tools"),
        ("grammar", "root ::= 'x'", "tools"),
        ("structured_outputs", {"choice": ["yes", "no"]}, "response_format"),
        ("json_schema", {"type": "object"}, "response_format"),
    ],
)
def test_a_demand_that_would_be_ignored_is_refused_with_the_field_to_send_instead(field, value, instead):
    error = refusal(**{field: value})
    assert error.param == field
    assert f"send {instead}" in error.message


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_an_older_field_that_demands_nothing_is_accepted(nothing):
    names = ("functions", "function_call", "guided_choice", "guided_grammar", "grammar", "structured_outputs")
    assert request(**dict.fromkeys(names, nothing)).form == OutputConstraint()
    assert request(function_call="auto").form == OutputConstraint()
    assert request(function_call="none").form == OutputConstraint(), (
        "without tools there is no call to forbid"
    )
    assert request(structured_outputs={"json": None, "regex": None}).form == OutputConstraint()
    assert (
        request(structured_outputs={"choice": nothing, "disable_fallback": False}).form == OutputConstraint()
    )


def test_a_call_that_is_forbidden_twice_is_forbidden():
    tools = [{"type": "function", "function": {"name": "read"}}]
    assert request(tools=tools, tool_choice="none", function_call="none").form.calls == "none"
    assert refusal(tools=tools, function_call="none").param == "function_call"
