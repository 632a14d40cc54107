"""OpenAI's messages and tools become ours, or the field at fault is named."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.chat import Message, ToolCall
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.content import UNSEEN_FILE
from start_llm.protocols.image_parts import UNSEEN_IMAGE, ImageParser
from start_llm.protocols.openai.chat_input import read_messages, read_tools
from tests.protocols.helpers import body

USER = {"role": "user", "content": "hi"}
IMAGES = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
    {"type": "image", "source": {}},
]
BLIND = ImageParser(None, b"")
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def read(*messages: Any) -> tuple[Message, ...]:
    return read_messages(body(messages=list(messages)), BLIND)


def one_message(**fields: Any) -> Message:
    (message,) = read({"role": "user"} | fields)
    return message


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call1", "type": "function", "function": {"name": "read", "arguments": arguments}}


def refusal(*messages: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        read(*messages)
    return refused.value


def test_messages_keep_their_places_and_developer_is_system():
    roles = ["user", "system", "assistant", "developer", "user", "tool"]
    messages = read(*({"role": role, "content": role} for role in roles))
    assert [message.role for message in messages] == ["user", "system", "assistant", "system", "user", "tool"]
    assert [message.content for message in messages] == roles


def test_parts_are_joined_in_order_with_nothing_between():
    parts = [
        {"type": "text", "text": "a "},
        {"type": "input_text", "text": "b"},
        "c",
        {"type": "output_text", "text": "\n"},
        {"type": "refusal", "refusal": "no"},
        {"type": "text", "text": ""},
    ]
    assert one_message(content=parts).content == "a bc\nno"
    assert one_message(content=[]).content == ""


@given(st.lists(st.text()))
def test_text_in_parts_is_the_same_as_text_in_one_string(texts):
    parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]
    assert one_message(content=parts) == one_message(content="".join(texts))


def test_null_and_absent_content_are_empty():
    assert one_message().content == one_message(content=None).content == ""


def test_an_assistant_message_may_hold_reasoning_under_either_name():
    for name in ("reasoning_content", "reasoning"):
        (message,) = read({"role": "assistant", "content": "x", name: "because"})
        assert message.reasoning == "because"
    (both,) = read({"role": "assistant", "reasoning_content": "first", "reasoning": "second"})
    assert both.reasoning == "first"
    (neither,) = read({"role": "assistant", "reasoning_content": None, "reasoning": ""})
    assert not neither.reasoning


def test_a_refusal_in_place_of_a_text_is_the_text():
    (message,) = read({"role": "assistant", "content": None, "refusal": "No."})
    assert message.content == "No."
    (message,) = read({"role": "assistant", "content": "Yes.", "refusal": None})
    assert message.content == "Yes."
    (message,) = read({"role": "user", "content": None, "refusal": "No."})
    assert message.content == ""


def test_only_an_assistant_message_holds_reasoning_and_calls():
    (message,) = read({**USER, "reasoning": "x", "tool_calls": [call("{}")]})
    assert message == Message(role="user", content="hi")


def test_a_tool_result_names_its_call():
    (message,) = read({"role": "tool", "content": "9 m", "tool_call_id": "call1", "name": "read"})
    assert message == Message(role="tool", content="9 m", tool_call_id="call1", name="read")


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ('{"path": "a.txt", "n": [1, null]}', {"path": "a.txt", "n": [1, None]}),
        ({"path": "a.txt"}, {"path": "a.txt"}),
        ("{}", {}),
        ("", {}),
        (None, {}),
        ('{"path": ', {"raw": '{"path": '}),
        ("read it", {"raw": "read it"}),
        ("[1]", {"raw": "[1]"}),
        ("null", {"raw": "null"}),
        ('{"a": NaN}', {"raw": '{"a": NaN}'}),
        ('{"a": "\\ud800"}', {"a": "\ufffd"}),
        ("[" * 100_000, {"raw": "[" * 100_000}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_are_parsed_and_text_that_is_no_object_is_kept_whole(sent, expected):
    (message,) = read({"role": "assistant", "content": None, "tool_calls": [call(sent)]})
    assert message.tool_calls == (ToolCall("call1", "read", expected),)
    json.dumps(expected, ensure_ascii=False).encode()


def test_calls_keep_their_order_and_an_id_may_be_missing():
    calls = [call("{}"), {"function": {"name": "write"}}]
    (message,) = read({"role": "assistant", "tool_calls": calls})
    assert message.tool_calls == (ToolCall("call1", "read", {}), ToolCall("", "write", {}))


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image["type"])
def test_an_image_is_refused_only_in_the_newest_user_message(image):
    newest = {"role": "user", "content": [{"type": "text", "text": "see"}, image]}
    error = refusal(USER, newest, {"role": "assistant", "content": "well"})
    assert error.param == "messages[1].content[1]"
    assert "cannot see images" in error.message

    messages = read(
        newest, {"role": "tool", "content": [image]}, {"role": "assistant", "content": [image]}, USER
    )
    assert [m.content for m in messages] == ["see" + UNSEEN_IMAGE, UNSEEN_IMAGE, UNSEEN_IMAGE, "hi"]


def test_an_image_in_a_tool_result_is_a_note_although_it_is_the_last_message():
    messages = read(USER, {"role": "tool", "content": ["page: ", IMAGES[0]]})
    assert messages[1].content == f"page: {UNSEEN_IMAGE}"
    (alone,) = read({"role": "tool", "content": [IMAGES[0]]})
    assert alone.content == UNSEEN_IMAGE


def test_parts_that_nobody_knows_are_notes_where_they_are_history():
    """Refused, they would come back on every turn."""
    parts = [
        {"type": "file", "file": {"file_data": "x"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "thinking", "thinking": "Hm.", "text": "said"},
    ]
    messages = read({"role": "user", "content": parts}, {"role": "assistant", "content": "?"}, USER)
    assert messages[0].content == f"{UNSEEN_FILE}[input_audio: this model cannot read it]said"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": "wizard"}, "messages[1].role"),
        ({"role": ["user"]}, "messages[1].role"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content"),
        ({"role": "user", "content": ["a", None]}, "messages[1].content[1]"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "video"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "refusal", "text": "x"}]}, "messages[1].content[0].refusal"),
        ({"role": "user", "name": 5}, "messages[1].name"),
        ({"role": "assistant", "reasoning": 5}, "messages[1].reasoning"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call(5)]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call("{}") | {"id": 5}]}, "messages[1].tool_calls[0].id"),
        ({"role": "tool", "tool_call_id": 5}, "messages[1].tool_call_id"),
        (
            {"role": "tool", "content": ["a", {"type": "tool_reference"}]},
            "messages[1].content[1].tool_name",
        ),
        (
            {"role": "tool", "content": [{"type": "tool_reference", "tool_name": 5}]},
            "messages[1].content[0].tool_name",
        ),
    ],
)
def test_the_field_at_fault_is_named_by_its_path(message, param):
    error = refusal(USER, message)
    assert error.param == param
    assert f"'{param}'" in error.message


@pytest.mark.parametrize("fields", [{}, {"messages": None}, {"messages": []}])
def test_a_conversation_has_at_least_one_message(fields):
    with pytest.raises(InvalidRequest, match="at least one message") as refused:
        read_messages(body(**fields), BLIND)
    assert refused.value.param == "messages"


def test_function_tools_are_kept_as_they_were_sent_and_others_left_out():
    strict = {"type": "function", "function": {"name": "write", "strict": True, "x-own": [1]}, "extra": 1}
    tools = read_tools(body(tools=[TOOL, {"type": "web_search", "filters": {}}, strict]))
    assert tools == ((TOOL, strict), ())
    assert read_tools(body()) == read_tools(body(tools=None)) == read_tools(body(tools=[])) == ((), ())


def test_what_is_meant_for_a_server_is_no_part_of_a_tool():
    mark = {"cache_control": {"type": "ephemeral"}}
    function: dict[str, Any] = {"name": "read"}
    tool, marked = (
        {"type": "function", "function": one_message} for one_message in (function, function | mark)
    )
    assert read_tools(body(tools=[tool | mark, marked])) == ((tool, tool), ())


def test_a_call_of_the_older_form_is_a_call():
    asked, result = read(
        {"role": "assistant", "function_call": {"name": "read", "arguments": '{"path": "x"}'}},
        {"role": "function", "name": "read", "content": "9 m"},
    )
    assert asked.tool_calls == (ToolCall("read", "read", {"path": "x"}),)
    assert (result.role, result.tool_call_id, result.content) == ("tool", "read", "9 m")
    error = refusal({"role": "assistant", "function_call": {"arguments": "{}"}})
    assert error.param == "messages[0].function_call.name"


def test_tools_whose_loading_is_deferred_come_apart_and_without_the_mark():
    late = {"type": "function", "function": {"name": "write"}}
    tools = [late | {"defer_loading": True}, TOOL | {"defer_loading": False}, TOOL | {"defer_loading": None}]
    assert read_tools(body(tools=tools)) == ((TOOL, TOOL), (late,))


def test_a_result_names_the_late_tools_that_it_makes_known():
    parts = [
        {"type": "text", "text": "Found: "},
        {"type": "tool_reference", "tool_name": "write"},
        {"type": "tool_reference", "tool_name": "move"},
        {"type": "text", "text": "two."},
    ]
    (message,) = read({"role": "tool", "tool_call_id": "call1", "content": parts})
    assert (message.content, message.tool_references) == ("Found: two.", ("write", "move"))
    (plain,) = read({"role": "tool", "tool_call_id": "call1", "content": "write"})
    assert plain.tool_references == ()


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (5, "tools[1]"),
        ({}, "tools[1].type"),
        ({"type": "function"}, "tools[1].function"),
        ({"type": "function", "function": {"name": ""}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": "a", "description": 5}}, "tools[1].function.description"),
        ({"type": "function", "function": {"name": "a", "parameters": []}}, "tools[1].function.parameters"),
        (TOOL | {"defer_loading": "yes"}, "tools[1].defer_loading"),
    ],
)
def test_a_tool_at_fault_is_named_by_its_path(tool, param):
    with pytest.raises(InvalidRequest) as refused:
        read_tools(body(tools=[TOOL, tool]))
    assert refused.value.param == param
