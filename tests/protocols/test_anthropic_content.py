"""Anthropic's system text, messages and tools become ours; nothing that is merely unknown is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.chat import Message, ToolCall
from start_llm.core.errors import InvalidRequest
from start_llm.prompt.canonical_form import for_the_model
from start_llm.protocols.anthropic.error_bodies import refuse_image
from start_llm.protocols.anthropic.messages_input import read_conversation, read_tools
from start_llm.protocols.image_parts import UNSEEN_IMAGE, ImageParser
from start_llm.protocols.seal import Sealed
from tests.protocols.helpers import body

USER = {"role": "user", "content": "hi"}
SECRETS = {"ours": Sealed("\nI wonder.\n", "aB3x" * 6)}
WONDER = SECRETS["ours"].reasoning
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
LINKED_IMAGE = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
BLIND = ImageParser(None, b"", refuse=refuse_image)
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.fba; cc_entrypoint=sdk-cli;"


def read(*messages: Any, **fields: Any) -> tuple[Message, ...]:
    return read_conversation(body(messages=list(messages), **fields), SECRETS.get, BLIND)


def one_message(**fields: Any) -> Message:
    (message,) = read({"role": "user"} | fields)
    return message


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def thinking(words: str, signature: str | None) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": signature}


def use(name: str = "read", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": arguments}


def result(content: Any, name: str = "read", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{name}", "content": content, **fields}


def reply(*blocks: Any) -> Message:
    (message,) = read({"role": "assistant", "content": list(blocks)})
    return message


def refusal(*messages: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        read(*messages, **fields)
    return refused.value


# -------------------------------------------------------------------------------------------- the system text


def test_the_system_text_comes_first_as_one_message():
    for system in ("Be brief.", [text("Be brief.")]):
        assert read(USER, system=system)[0] == Message(role="system", content="Be brief.")
    blocks = [text("You are an agent."), text("\nWork."), text(""), text("Be brief.")]
    assert read(USER, system=blocks)[0].content == "You are an agent.\n\n\nWork.\n\nBe brief."


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_no_system_text_is_no_message(system):
    assert [message.role for message in read(USER, system=system)] == ["user"]


def test_the_billing_header_is_a_first_line_that_the_model_does_not_see():
    messages = read(USER, system=[text(BILLING), text("You are an agent.")])
    assert messages[0].content.startswith(f"{BILLING}\n")
    assert for_the_model(messages)[0].content == "You are an agent."


def test_each_block_of_the_system_text_begins_a_line():
    """Rules about lines find them there."""
    (system, _) = read(USER, system=[text("You are an agent."), text("gitStatus: clean")])
    assert "gitStatus: clean" in system.content.splitlines()


# --------------------------------------------------------------------------------------------------- messages


def test_messages_keep_their_places_and_developer_is_system():
    roles = ["user", "system", "assistant", "developer", "user"]
    messages = read(*({"role": role, "content": role} for role in roles))
    assert [message.role for message in messages] == ["user", "system", "assistant", "system", "user"]
    assert [message.content for message in messages] == roles


@given(st.lists(st.text()), st.sampled_from(["user", "assistant", "system"]))
def test_text_in_blocks_is_the_same_as_text_in_one_string(texts, role):
    assert one_message(role=role, content=[text(words) for words in texts]) == one_message(
        role=role, content="".join(texts)
    )


@pytest.mark.parametrize("content", [None, "", []])
def test_a_message_may_be_empty(content):
    assert one_message(content=content) == Message(role="user")


def test_results_come_before_what_is_said_in_the_order_in_which_they_were_sent():
    blocks = [result("two", "b"), text("And "), result([text("one")], "a"), text("now?")]
    assert read({"role": "user", "content": blocks}) == (
        Message(role="tool", content="two", tool_call_id="toolu_b"),
        Message(role="tool", content="one", tool_call_id="toolu_a"),
        Message(role="user", content="And now?"),
    )


def test_results_alone_are_no_question():
    (message,) = read({"role": "user", "content": [result("9 m")]})
    assert message == Message(role="tool", content="9 m", tool_call_id="toolu_read")


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"is_error": True}, "[The call failed]\nno such file"),
        ({"is_error": False}, "no such file"),
        ({"is_error": None}, "no such file"),
    ],
)
def test_that_a_call_failed_is_in_its_result(fields, content):
    assert one_message(content=[result("no such file", **fields)]).content == content


def test_blocks_of_a_result_stay_apart():
    content = one_message(content=[result([text("a.py"), text(""), text("b.py")])]).content
    assert content == "a.py\nb.py"


@pytest.mark.parametrize("content", [None, [], ""])
def test_a_result_may_be_empty(content):
    assert one_message(content=[result(content)]).content == ""


def test_a_result_may_make_late_tools_known():
    references = [{"type": "tool_reference", "tool_name": name} for name in ("write", "erase")]
    message = one_message(content=[result([*references, text("Found.")])])
    assert (message.tool_references, message.content) == (("write", "erase"), "Found.")


def test_a_reply_has_its_texts_its_reasoning_and_its_calls():
    message = reply(thinking("Hm.", "theirs"), text("a"), use(path="x"), text("b"), use("write", n=1.5))
    assert message == Message(
        role="assistant",
        content="ab",
        reasoning="Hm.",
        tool_calls=(
            ToolCall("toolu_read", "read", {"path": "x"}),
            ToolCall("toolu_write", "write", {"n": 1.5}),
        ),
    )


@pytest.mark.parametrize(
    ("block", "reasoning"),
    [
        (thinking("", "ours"), WONDER),
        (thinking("I wonder.", "ours"), WONDER),
        (thinking("I doubt.", "ours"), "I doubt."),
        (thinking("I wonder.", "theirs"), "I wonder."),
        (thinking("I wonder.", ""), "I wonder."),
        (thinking("I wonder.", None), "I wonder."),
        (thinking("", "theirs"), None),
        ({"type": "thinking"}, None),
        ({"type": "redacted_thinking", "data": "ours"}, WONDER),
        ({"type": "redacted_thinking", "data": "theirs"}, None),
    ],
    ids=repr,
)
def test_a_signature_of_ours_is_the_reasoning_itself(block, reasoning):
    message = reply(block, text("Yes."))
    assert (message.reasoning, message.content) == (reasoning, "Yes.")
    is_signed = "ours" in block.values()
    assert message.reply_name == (SECRETS["ours"].reply_name if is_signed else "")


def test_a_call_may_have_no_arguments_and_no_id():
    assert reply({"type": "tool_use", "name": "read", "input": None}).tool_calls == (
        ToolCall("", "read", {}),
    )


# ------------------------------------------------------------------------------------ images and other blocks


@pytest.mark.parametrize("image", [IMAGE, LINKED_IMAGE], ids=["base64", "url"])
def test_an_image_in_the_newest_question_is_refused_and_named(image):
    """As Anthropic names it: Claude Code leaves an image out from then on if it knows which one it was."""
    error = refusal(USER, {"role": "user", "content": [text("see"), image]})
    assert error.param == "messages[1].content[1]"
    assert error.message == "messages.1.content.1.image: this model cannot see images."


def test_other_images_become_a_note():
    history, answer = {"role": "user", "content": [text("see"), IMAGE]}, {"role": "assistant", "content": "?"}
    in_result = {"role": "user", "content": [result([text("page: "), LINKED_IMAGE]), IMAGE]}
    contents = [message.content for message in read(history, answer, in_result)]
    assert contents == ["see" + UNSEEN_IMAGE, "?", f"page: \n{UNSEEN_IMAGE}", UNSEEN_IMAGE]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "It is deep."},
            },
            "[document]\nIt is deep.\n",
        ),
        (
            {
                "type": "document",
                "title": "Seas",
                "context": "of 2026",
                "source": {"type": "content", "content": [text("It is "), text("deep.")]},
            },
            "[document: Seas]\nof 2026\nIt is deep.\n",
        ),
        (
            {"type": "document", "title": "Seas", "source": {"type": "base64", "data": "AA=="}},
            "[document Seas: this model reads text alone]\n",
        ),
        ({"type": "document"}, "[document: this model reads text alone]\n"),
        (
            {"type": "search_result", "title": "Seas", "source": "/a", "content": [text("deep")]},
            "[search result: Seas]\n/a\ndeep\n",
        ),
        ({"type": "container_upload", "file_id": "f"}, "[container_upload: this model cannot read it]"),
        ({"type": "text_of_tomorrow", "text": "Hello."}, "Hello."),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_other_blocks_become_text(block, expected):
    assert one_message(content=[text("a"), block]).content == "a" + expected
    assert one_message(content=[result([text("a"), block])]).content == "a\n" + expected


def test_an_unknown_block_of_a_reply_becomes_text_too():
    message = reply(text("a"), {"type": "tomorrows_use", "id": "s", "name": "web_search", "input": {}})
    assert message.content == "a[tomorrows_use: this model cannot read it]"


def test_calls_that_anthropic_ran_and_their_results_are_text():
    web_result = {
        "type": "web_search_result",
        "title": "Seas",
        "url": "https://sea.example",
        "encrypted_content": "abc",
        "page_age": None,
    }
    message = reply(
        text("a"),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "How deep?"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [web_result]},
        {"type": "server_tool_use", "id": "s2", "name": "code_execution", "input": {"code": "1\n2"}},
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "s2",
            "content": {"type": "code_execution_result", "stdout": "two\n", "stderr": "", "return_code": 0},
        },
        {"type": "mcp_tool_use", "id": "m", "name": "find", "server_name": "sea", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [text("It is.")]},
    )
    assert message.content == (
        "a[server_tool_use]\nname: web_search\nquery: How deep?\n"
        '[web_search_tool_result]\ncontent:\n{"title": "Seas", "url": "https://sea.example"}\n'
        "[server_tool_use]\nname: code_execution\ncode: 1\n2\n"
        "[code_execution_tool_result]\nstdout: two\n\nstderr: \nreturn_code: 0\n"
        "[mcp_tool_use]\nname: find\nserver_name: sea\n"
        "[mcp_tool_result]\nis_error: false\ncontent:\nIt is.\n"
    )
    assert not message.tool_calls


def test_a_result_that_is_nested_too_deeply_is_named_and_not_refused():
    deep: Any = "x"
    for _ in range(900):
        deep = {"a": deep}
    message = reply({"type": "web_search_tool_result", "tool_use_id": "s", "content": deep})
    assert message.content.startswith("[web_search_tool_result")


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [result(5)]}], "messages[0].content[0].content"),
        ([{"role": "user", "content": [result("x", is_error="no")]}], "messages[0].content[0].is_error"),
        ([{"role": "assistant", "content": [{"type": "tool_use"}]}], "messages[0].content[0].name"),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": "{}"}]}],
            "messages[0].content[0].input",
        ),
    ],
    ids=str,
)
def test_the_field_at_fault_is_named(messages, param):
    error = refusal(*messages)
    assert error.param == param
    assert f"'{param}'" in error.message


def test_a_system_text_of_another_type_is_refused():
    assert refusal(USER, system=5).param == "system"


# ------------------------------------------------------------------------------------------------------ tools


def test_tools_have_the_form_that_templates_know():
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tool = {"name": "read", "description": "To read.", "input_schema": schema, "cache_control": {}, "x": 1}
    function = {"name": "read", "description": "To read.", "parameters": schema}
    for kind in ({}, {"type": None}, {"type": "custom"}):
        assert read_tools(body(tools=[tool | kind])) == (({"type": "function", "function": function},), ())
    assert read_tools(body(tools=[{"name": "read"}])) == (
        ({"type": "function", "function": {"name": "read"}},),
        (),
    )


def test_tools_of_anthropics_servers_are_left_out():
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert read_tools(body(tools=[search, {"type": "mcp_toolset"}])) == ((), ())
    assert read_tools(body()) == read_tools(body(tools=None)) == ((), ())


def test_the_tools_that_the_client_runs_have_their_published_schemas():
    tools, late = read_tools(
        body(
            tools=[
                {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}},
                {"type": "computer_20250124", "display_width_px": 640, "display_height_px": 480},
                {"type": "memory_20250818", "name": "memory", "defer_loading": True},
            ]
        )
    )
    offered: Any = (*tools, *late)
    bash, computer, memory = (tool["function"] for tool in offered)
    assert (bash["name"], bash["parameters"]["required"]) == ("bash", ["command"])
    assert (computer["name"], "640 x 480" in computer["description"]) == ("computer", True)
    assert (memory["name"], len(late)) == ("memory", 1)


def test_a_deferred_tool_is_late():
    tools, late = read_tools(
        body(tools=[{"name": "a", "defer_loading": True}, {"name": "b", "defer_loading": False}])
    )
    assert tools == ({"type": "function", "function": {"name": "b"}},)
    assert late == ({"type": "function", "function": {"name": "a"}},)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("all", "tools"),
        ([5], "tools[0]"),
        ([{}], "tools[0].name"),
        ([{"name": "a", "input_schema": "any"}], "tools[0].input_schema"),
        ([{"name": "a", "description": 5}], "tools[0].description"),
    ],
    ids=str,
)
def test_the_field_of_a_tool_at_fault_is_named(tools, param):
    with pytest.raises(InvalidRequest) as refused:
        read_tools(body(tools=tools))
    assert refused.value.param == param
