"""Requests for responses: items, tools, earlier responses, and the refused ones."""

import json
from typing import Any

import pytest

from start_llm.core.chat import ChatRequest, JsonAnswer, Message, OutputConstraint, ToolCall
from start_llm.core.errors import InvalidRequest, NotFound
from start_llm.core.events import Content, Finished, Reasoning, Usage
from start_llm.protocols.base import ParsedRequest, RequestContext
from start_llm.protocols.content import UNSEEN_FILE
from start_llm.protocols.fields import Fields
from start_llm.protocols.image_parts import UNSEEN_IMAGE
from start_llm.protocols.notices import Notices
from start_llm.protocols.openai import chat_completions as openai_chat
from start_llm.protocols.responses.create import input_token_count_body, parse, refusal
from start_llm.protocols.responses.stored_responses import deletion_body, input_items, stored_body
from start_llm.protocols.seal import KEY_BYTES, Seal
from tests.protocols.helpers import CONTEXT, MODEL, body, events

SEAL = CONTEXT.seal
ASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How deep?"}]}
SAY = {
    "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
    "content": [{"type": "output_text", "text": "Deep.", "annotations": []}],
}  # fmt: skip
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "read", "arguments": '{"path": "x"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "52 m"}
READ = {
    "type": "function", "name": "read", "description": "Reads.", "strict": True,
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}  # fmt: skip
USER = Message(role="user", content="How deep?")


def call_of(
    context: RequestContext = CONTEXT, headers: dict[str, str] | None = None, **fields: Any
) -> ParsedRequest:
    return parse(body(**{"input": "hi", **fields}), headers or {}, context)


def request_of(context: RequestContext = CONTEXT, /, **fields: Any) -> ChatRequest:
    request = call_of(context, **fields).request
    assert isinstance(request, ChatRequest)
    return request


def messages_of(*items: Any, **fields: Any) -> list[Message]:
    return list(request_of(input=list(items), **fields).messages)


def new_context() -> tuple[RequestContext, list[str]]:
    """One that has kept nothing yet, and what its terminal shows."""
    lines: list[str] = []
    return RequestContext(MODEL, b"tenant", SEAL, notices=Notices(lines.append)), lines


def reasoning(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


# ------------------------------------------------------------------------------------------------------ items


def test_a_text_is_a_question():
    assert request_of(input="How deep?").messages == (USER,)


def test_items_are_messages_where_they_stand():
    read = messages_of(
        {"type": "message", "role": "developer", "content": "Be brief."},
        ASK,
        SAY,
        {"role": "system", "content": "Late."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "And "}, {"type": "text", "text": "now?"}],
        },
    )
    assert read == [
        Message(role="system", content="Be brief."),
        USER,
        Message(role="assistant", content="Deep."),
        Message(role="system", content="Late."),
        Message(role="user", content="And now?"),
    ]


def test_the_instructions_are_the_first_message():
    (first, *_) = messages_of({"role": "developer", "content": "Later."}, ASK, instructions="First.")
    assert first == Message(role="system", content="First.")
    assert messages_of(ASK, instructions="") == [USER]


def test_what_the_assistant_said_in_one_turn_is_one_message_as_a_chat_has_it():
    later = {**CALL, "call_id": "c2", "name": "write", "arguments": "{}"}
    thought = reasoning(content=[{"type": "reasoning_text", "text": "Hm."}])
    read = messages_of(ASK, thought, SAY, CALL, later, {**SAY, "content": "\nBehind."}, RESULT)
    chat = openai_chat.parse(
        body(
            messages=[
                {"role": "user", "content": "How deep?"},
                {
                    "role": "assistant",
                    "content": "Deep.\nBehind.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {"id": "c1", "function": {"name": "read", "arguments": '{"path": "x"}'}},
                        {"id": "c2", "function": {"name": "write", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "52 m"},
            ]
        ),
        {},
        CONTEXT,
    ).request
    assert isinstance(chat, ChatRequest)
    assert tuple(read) == chat.messages


def test_two_texts_side_by_side_are_two_replies_as_in_a_chat():
    first, second = ({**SAY, "content": text} for text in ("First answer.", "Second answer."))
    read = messages_of(ASK, first, second, CALL, RESULT)
    assert [(message.role, message.content, len(message.tool_calls)) for message in read[1:]] == [
        ("assistant", "First answer.", 0),
        ("assistant", "Second answer.", 1),
        ("tool", "52 m", 0),
    ]


def test_two_texts_of_one_reply_are_joined_where_its_reasoning_was_left_out():
    first, second = ({**SAY, "id": f"msg_{number}_{NAME}", "content": f"{number}"} for number in (1, 2))
    (_, reply) = messages_of(ASK, first, second)
    assert reply.content == "12"


def test_results_part_one_turn_from_the_next():
    read = messages_of(ASK, CALL, RESULT, reasoning(summary=[{"type": "summary_text", "text": "So."}]), SAY)
    assert [message.role for message in read] == ["user", "assistant", "tool", "assistant"]
    assert (read[3].reasoning, read[3].content) == ("So.", "Deep.")


@pytest.mark.parametrize("last", [reasoning(summary=[{"text": "Hm."}]), CALL, SAY])
def test_a_turn_may_be_there_to_be_continued(last):
    *_, message = messages_of(ASK, last)
    assert message.role == "assistant"


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("52 m", "52 m"),
        ("", ""),
        (None, ""),
        ([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], "ab"),
        ([{"type": "input_image", "image_url": "data:x"}], UNSEEN_IMAGE),
        ([{"type": "input_file", "file_data": "x"}], UNSEEN_FILE),
    ],
)
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_a_result_is_text(kind, output, text):
    (*_, result) = messages_of(ASK, CALL, {"type": kind, "call_id": "c1", "output": output})
    assert result == Message(role="tool", content=text, tool_call_id="c1")


def test_what_the_model_cannot_see_is_refused_in_the_newest_question_alone():
    image = {"type": "input_image", "image_url": "data:image/png;base64,x"}
    old = {"role": "user", "content": [image, {"type": "input_file", "file_id": "x"}]}
    assert messages_of(old, ASK)[0].content == UNSEEN_IMAGE + UNSEEN_FILE
    with pytest.raises(InvalidRequest) as refused:
        messages_of(ASK, CALL, RESULT, {"role": "user", "content": [image]})
    assert refused.value.param == "input[3].content[0]"
    answered = messages_of({"role": "user", "content": [image]}, CALL, RESULT)
    assert answered[0].content == UNSEEN_IMAGE


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("field", ["metadata", "user", "prompt_cache_key"])
def test_what_could_be_read_and_not_be_repeated_is_refused(field: str):
    """A response has it some levels deeper."""
    value: Any = "x"
    with pytest.raises(RecursionError):
        while json.dumps(value):
            value = {"a": value}
    for _ in range(8):
        value = value["a"]
    with pytest.raises(InvalidRequest, match=f"'{field}' is nested too deeply") as refused:
        request_of(input="hi", **{field: value})
    assert refused.value.param == field


def test_items_of_types_that_have_no_form_are_left_out_and_reported_once():
    context, notices = new_context()
    search = {"type": "call_of_tomorrow", "id": "ws_1", "status": "completed"}
    for _ in range(2):
        assert request_of(context, input=[ASK, search, SAY]).messages == (
            USER,
            Message(role="assistant", content="Deep."),
        )
    assert notices == ["Items of type 'call_of_tomorrow' are not shown to the model."]


# --------------------------------------------------------------------------------------------- vendors' items


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "Seas"}},
            "[web_search_call]\nstatus: completed\nquery: Seas\n",
        ),
        (
            {"type": "file_search_call", "queries": ["sea"], "results": [{"file_id": "1", "text": "x"}]},
            "[file_search_call]\nqueries:\nsea\nresults:\nx\n",
        ),
        (
            {"type": "code_interpreter_call", "id": "c", "container_id": "d", "code": "1", "outputs": None},
            "[code_interpreter_call]\ncode: 1\n",
        ),
        (
            {"type": "mcp_call", "server_label": "sea", "name": "f", "arguments": "{}", "output": "9"},
            "[mcp_call]\nserver_label: sea\nname: f\narguments: {}\noutput: 9\n",
        ),
        (
            {"type": "mcp_list_tools", "id": "m", "server_label": "sea", "tools": [{"name": "f"}]},
            '[mcp_list_tools]\nserver_label: sea\ntools:\n{"name": "f"}\n',
        ),
        ({"type": "image_generation_call", "id": "i", "result": "AAAA"}, "[image_generation_call]\n"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_a_vendor_ran_is_text_of_the_reply(item, text):
    context, notices = new_context()
    (_, message) = request_of(context, input=[ASK, item]).messages
    assert (message.role, message.content, message.tool_calls) == ("assistant", text, ())
    assert notices == []


def test_an_approval_is_the_users():
    response = {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True}
    (_, message) = messages_of(ASK, response)
    assert message.role == "user"
    assert "approve: true" in message.content


@pytest.mark.parametrize(
    ("call", "called", "result", "text"),
    [
        (
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            ToolCall("c1", "local_shell", {"command": ["ls"]}),
            {"type": "local_shell_call_output", "output": "a.txt"},
            "a.txt",
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls", "pwd"], "timeout_ms": None}},
            ToolCall("c1", "shell", {"commands": ["ls", "pwd"]}),
            {"type": "shell_call_output", "output": [
                {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "b", "stderr": "c", "outcome": {"type": "timeout"}},
            ]},
            "a\n[Exit code 0]\nb\nc\n[It took too long]\n",
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
            ToolCall("c1", "apply_patch", {"type": "delete_file", "path": "a"}),
            {"type": "apply_patch_call_output", "status": "failed", "output": "No file."},
            "[The call failed]\nNo file.",
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
            ToolCall("c1", "apply_patch", {"type": "delete_file", "path": "a"}),
            {"type": "apply_patch_call_output", "status": "completed"},
            "Done.",
        ),
        (
            {"type": "computer_call", "action": {"type": "click", "x": 1, "y": 2}},
            ToolCall("c1", "computer", {"action": {"type": "click", "x": 1, "y": 2}}),
            {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "x"}},
            UNSEEN_IMAGE,
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_the_client_ran_is_a_call_with_its_result(call, called, result, text):
    made, given = messages_of(ASK, {**call, "call_id": "c1"}, {**result, "call_id": "c1"})[1:]
    assert made.tool_calls == (called,)
    assert (given.role, given.tool_call_id, given.content) == ("tool", "c1", text)


def test_the_tools_that_the_client_runs_are_offered_with_their_published_schemas():
    context, notices = new_context()
    tools = [
        {"type": "local_shell"},
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "apply_patch"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "namespace", "name": "a", "tools": [{"type": "shell"}]},
    ]
    asked = request_of(context, tools=tools, tool_choice={"type": "shell"})
    offered: Any = asked.tools
    required = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in offered}
    assert required == {"local_shell": ["command"], "shell": ["commands"], "apply_patch": ["type", "path"]}
    assert asked.form == OutputConstraint(calls="must", tools=frozenset({"shell"}))
    assert notices == ["Tools of type 'shell' are not offered to the model."]


# -------------------------------------------------------------------------------------------------- reasoning


def read_reasoning(tenant: bytes = CONTEXT.tenant, /, **fields: Any) -> str | None:
    messages = request_of(RequestContext(MODEL, tenant, SEAL), input=[ASK, reasoning(**fields), SAY]).messages
    return messages[1].reasoning


NAME = "aB3x" * 6
SEALED = SEAL.seal("\nExactly. 🐟\n", NAME, CONTEXT.tenant)
CLEAR: dict[str, Any] = {"summary": [{"type": "summary_text", "text": "Short."}]}
WHOLE: dict[str, Any] = {
    "content": [{"type": "reasoning_text", "text": "Long"}, {"type": "reasoning_text", "text": "er."}]
}


AS_IT_CAME = [{"text": "Exactly."}, {"text": " 🐟"}]


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"summary": None, "content": None},
        {"summary": [{"text": "Exactly. 🐟"}]},
        {"content": AS_IT_CAME},
        {"content": AS_IT_CAME, **CLEAR},
        {"content": [{"text": " "}], "summary": []},
    ],
)
def test_a_sealed_reasoning_comes_back_exactly(beside):
    assert read_reasoning(**beside, encrypted_content=SEALED) == "\nExactly. 🐟\n"


@pytest.mark.parametrize(
    ("beside", "read"), [(CLEAR, "Short."), (WHOLE, "Longer."), (CLEAR | WHOLE, "Longer.")]
)
def test_an_edited_reasoning_counts_and_not_the_sealed_one(beside, read):
    assert read_reasoning(**beside, encrypted_content=SEALED) == read


@pytest.mark.parametrize(
    "sealed", [None, "", "enc1", SEALED[:-8], Seal(b"y" * KEY_BYTES).seal("Other.", NAME, b"tenant")]
)
def test_without_a_seal_of_ours_the_reasoning_in_clear_counts(sealed):
    assert read_reasoning(**CLEAR, **WHOLE, encrypted_content=sealed) == "Longer."
    assert read_reasoning(**CLEAR, encrypted_content=sealed) == "Short."
    assert read_reasoning(encrypted_content=sealed) is None


def test_reasoning_that_was_sealed_for_another_tenant_is_not_opened():
    assert read_reasoning(b"other", encrypted_content=SEALED) is None
    assert read_reasoning(b"other", **CLEAR, encrypted_content=SEALED) == "Short."


def test_an_empty_reasoning_was_not_sent():
    empty = {"content": [{"type": "reasoning_text", "text": ""}]}
    assert messages_of(ASK, reasoning(**empty)) == messages_of(ASK) == [USER]


def test_paragraphs_of_a_summary_stay_apart():
    paragraphs = [{"type": "summary_text", "text": "One."}, {"type": "summary_text", "text": "Two."}]
    assert read_reasoning(summary=paragraphs) == "One.\n\nTwo."


# ------------------------------------------------------------------------------------------------------ tools


def names_of(*tools: Any) -> list[str]:
    return [schema["function"]["name"] for schema in schemas_of(*tools)]


def schemas_of(*tools: Any) -> list[Any]:
    return list(request_of(tools=list(tools)).tools)


def test_a_function_is_passed_as_a_template_knows_it():
    assert schemas_of(READ) == [
        {
            "type": "function",
            "function": {name: READ[name] for name in ("name", "description", "parameters")},
        }
    ]
    assert schemas_of(
        {"type": "function", "name": "x", "description": None, "parameters": None, "strict": None}
    ) == [{"type": "function", "function": {"name": "x"}}]


def namespace(name: str, *tools: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": list(tools), **fields}


def test_nested_functions_have_flat_names_and_what_is_said_of_all_is_said_with_the_first():
    close = {"type": "function", "name": "close", "description": "Ends one."}
    first, second = schemas_of(
        namespace("agents", close, {"type": "function", "name": "open"}, description="Helpers.")
    )
    assert first["function"] == {"name": "agents__close", "description": "Helpers.\n\nEnds one."}
    assert second["function"] == {"name": "agents__open"}


def test_flat_names_are_unique():
    inner = {"type": "function", "name": "close"}
    flat = {"type": "function", "name": "a__close"}
    tools = [namespace("a", inner), flat, namespace("a_", {**inner, "name": "_close"}), inner]
    names = names_of(*tools)
    assert len(set(names)) == len(names) == 4
    assert names[1] == "a__close"
    calls = [
        {**CALL, "namespace": "a", "name": "close"},
        {**CALL, "name": "a__close"},
        {**CALL, "namespace": "a_", "name": "_close"},
        {**CALL, "name": "close"},
    ]
    (_, reply) = messages_of(ASK, *calls, tools=tools)
    assert [call.name for call in reply.tool_calls] == names


def test_a_nested_call_is_read_under_its_flat_name_also_when_the_tool_is_gone():
    nested = {**CALL, "namespace": "agents", "name": "close", "arguments": "{}"}
    for tools in ([], [namespace("agents", {"type": "function", "name": "close"})]):
        (_, reply) = messages_of(ASK, nested, tools=tools)
        assert reply.tool_calls == (ToolCall("c1", "agents__close", {}),)


def custom(name: str, form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "custom", "name": name, "format": form}


def test_a_custom_tool_has_one_text():
    (schema,) = schemas_of(
        {"type": "custom", "name": "note", "description": "Notes.", "format": {"type": "text"}}
    )
    function = schema["function"]
    assert (function["name"], function["description"]) == ("note", "Notes.")
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    called = {"type": "custom_tool_call", "call_id": "c1", "name": "note", "input": 'a "b"\n'}
    (_, reply) = messages_of(ASK, called)
    assert reply.tool_calls == (ToolCall("c1", "note", {"input": 'a "b"\n'}),)


def test_a_custom_tool_with_a_grammar_shows_it_and_has_it_under_the_models_name():
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    patch = {"type": "custom", "name": "patch", "description": "Edits.", "format": form}
    asked = request_of(tools=[patch, namespace("files", patch)])
    offered: Any = asked.tools
    plain, nested = (tool["function"] for tool in offered)
    assert plain["description"].startswith("Edits.\n\n")
    assert plain["description"].endswith('Lark grammar:\nstart: "x"')
    assert plain["parameters"]["required"] == ["input"]
    assert [plain["name"], nested["name"]] == ["patch", "files__patch"]
    assert [grammar.tool for grammar in asked.grammars] == ["patch", "files__patch"]
    assert [grammar.field for grammar in asked.grammars] == [
        "tools[0].format.definition",
        "tools[1].tools[0].format.definition",
    ]
    assert {(grammar.syntax, grammar.definition) for grammar in asked.grammars} == {("lark", 'start: "x"')}


def test_tools_that_cannot_be_offered_are_left_out_and_reported_once():
    context, notices = new_context()
    tools = [
        READ,
        {"type": "web_search", "external_web_access": True},
        namespace("a", {"type": "namespace", "name": "b"}),
    ]
    for _ in range(2):
        assert len(request_of(context, tools=tools).tools) == 1
    assert notices == [
        "Tools of type 'web_search' are not offered to the model.",
        "Tools of type 'namespace' are not offered to the model.",
    ]


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        ("none", OutputConstraint(calls="none")),
        ("required", OutputConstraint(calls="must")),
        ({"type": "function", "name": "read"}, OutputConstraint(calls="must", tools=frozenset({"read"}))),
        ({"type": "custom", "name": "note"}, OutputConstraint(calls="must", tools=frozenset({"note"}))),
        (
            {"type": "function", "name": "read", "namespace": "agents"},
            OutputConstraint(calls="must", tools=frozenset({"agents__read"})),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "read"}]},
            OutputConstraint(tools=frozenset({"read"})),
        ),
    ],
    ids=str,
)
def test_what_may_be_called_arrives_and_the_tools_stay(choice, form):
    tools = [READ, {"type": "custom", "name": "note"}, namespace("agents", READ)]
    asked = request_of(tools=tools, tool_choice=choice)
    assert (len(asked.tools), asked.form) == (3, form)


def test_one_call_can_be_the_limit():
    assert request_of(tools=[READ], parallel_tool_calls=False).form.one_call


# ---------------------------------------------------------------------------------------------------- options


def test_options_are_read():
    request = request_of(
        max_output_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=1, prompt_cache_key="key"
    )
    options = request.options
    assert (options.max_tokens, options.seed) == (7, 1)
    assert (options.sampling.temperature, options.sampling.top_p, options.sampling.top_k) == (0.5, 0.9, 3)
    assert request.session_id == "key"
    assert request_of().options.max_tokens is None


@pytest.mark.parametrize(
    ("effort", "on", "level"),
    [("none", False, None), ("low", True, "low"), (None, None, None), ("odd", None, None)],
)
def test_the_effort_of_reasoning_is_read(effort, on, level):
    thinking = request_of(reasoning={"effort": effort, "summary": "auto"}).thinking
    assert (thinking.on, thinking.effort) == (on, level)


def test_fields_that_change_nothing_are_taken():
    known: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"], "truncation": "auto", "metadata": {"a": "b"},
        "user": "me",
        "parallel_tool_calls": True, "service_tier": "auto", "safety_identifier": "x", "top_logprobs": 0,
        "stream_options": {"include_obfuscation": False}, "max_tool_calls": 3, "text": {"verbosity": "low"},
        "client_metadata": {"x": 1}, "background": False, "conversation": None, "prompt": None,
    }  # fmt: skip
    assert request_of(**known).messages == request_of(unknown={"x": 1}).messages == request_of().messages
    assert request_of(conversation={"id": None}, prompt={}).messages == request_of().messages


def test_the_format_of_an_answer_arrives():
    form = {"type": "json_schema", "name": "x", "schema": {"type": "array"}}
    answer = JsonAnswer(schema={"type": "array"}, field="text.format.schema")
    assert request_of(text={"format": form}).form.answer == answer
    anything = JsonAnswer(schema={"type": "object"}, field="text.format")
    assert request_of(text={"format": {"type": "json_object"}}).form.answer == anything
    assert (
        request_of(text={"format": {"type": "text"}}).form == request_of(text={}).form == OutputConstraint()
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"role": "user"}}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "odd"}]}]}, "input[0].content[0].type"),
        ({"input": [ASK, {**CALL, "name": ""}]}, "input[1].name"),
        ({"input": [ASK, {**CALL, "arguments": 5}]}, "input[1].arguments"),
        ({"input": [ASK, {**CALL, "namespace": 5}]}, "input[1].namespace"),
        ({"input": [ASK, {**CALL, "call_id": 5}]}, "input[1].call_id"),
        ({"input": [ASK, {**RESULT, "output": 5}]}, "input[1].output"),
        ({"input": [ASK, reasoning(summary="x")]}, "input[1].summary"),
        ({"input": [ASK, reasoning(content=[{"text": 5}])]}, "input[1].content[0].text"),
        ({"input": [ASK, reasoning(encrypted_content=5)]}, "input[1].encrypted_content"),
        ({"input": [ASK, {"id": 5}]}, "input[1].id"),
        ({"instructions": 5}, "instructions"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"store": "yes"}, "store"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"include": "x"}, "include"),
        ({"metadata": "x"}, "metadata"),
        ({"truncation": 5}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": "x"}, "text"),
        ({"text": {"format": "x"}}, "text.format"),
        ({"reasoning": 5}, "reasoning"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"model": 5}, "model"),
        ({"temperature": 9}, "temperature"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**READ, "parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [{**READ, "description": 5}]}, "tools[0].description"),
        ({"tools": [namespace("", READ)]}, "tools[0].name"),
        ({"tools": [namespace("a", {"type": "function"})]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "custom", "name": "x", "format": "x"}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]}, "tools[0].format.type"),
        (
            {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.definition",
        ),
        (
            {"tools": [custom("x", {"type": "grammar", "syntax": "ebnf", "definition": "x"})]},
            "tools[0].format.syntax",
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "read"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"grammar": "root ::= 'x'"}, "grammar"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_wrong_is_refused_with_the_name_of_the_field(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        call_of(**fields)
    assert refused.value.param == param
    assert f"'{param}'" in refused.value.message


def test_what_is_wrong_with_the_messages_is_wrong_with_the_input():
    error: Any = refusal(InvalidRequest("No.", param="messages"))["error"]
    assert (error["param"], error["message"]) == ("input", "No.")
    other: Any = refusal(InvalidRequest("No.", param="tools[0].name"))["error"]
    assert other["param"] == "tools[0].name"


# ----------------------------------------------------------------------------------------------------- before


def answered(context: RequestContext, text: int = 0, **fields: Any) -> str:
    """The id of a response that has ended."""
    reply = call_of(context, **fields).reply
    reply.whole(*events([text]))
    return reply.id


def test_a_request_goes_on_from_a_response():
    context, _ = new_context()
    first = answered(context, input=[ASK], instructions="Be brief.")
    second = answered(context, input="Why?", previous_response_id=first)
    third = request_of(context, input="And?", previous_response_id=second)
    assert [(message.role, message.content) for message in third.messages] == [
        ("system", "Be brief."),
        ("user", "How deep?"),
        ("assistant", "Hello"),
        ("user", "Why?"),
        ("assistant", "Hello"),
        ("user", "And?"),
    ]
    other = request_of(context, input="And?", previous_response_id=second, instructions="Be long.")
    assert [message.content for message in other.messages if message.role == "system"] == ["Be long."]
    assert request_of(context, input=None, previous_response_id=first).messages[-1].content == "Hello"


def test_a_streamed_response_can_be_continued_as_soon_as_its_end_is_sent():
    context, _ = new_context()
    reply = call_of(context).reply
    outputs, end = events([0])
    for output in outputs:
        list(reply.output(output))
    assert context.responses.counts()["entries"] == 0
    list(reply.closing(end))
    assert request_of(context, previous_response_id=reply.id).messages[1].content == "Hello"


def test_what_is_not_to_be_stored_is_not():
    context, _ = new_context()
    name = answered(context, store=False)
    with pytest.raises(NotFound) as missing:
        call_of(context, previous_response_id=name)
    assert missing.value.param == "previous_response_id"
    assert (missing.value.status, name in missing.value.message) == (404, True)


def test_a_prewarm_is_complete_and_not_stored():
    context, _ = new_context()
    call = call_of(context, prompt_cache_options={"prewarm": True}, max_output_tokens=5)
    assert call.request.options.is_prewarm
    body = call.reply.whole([], Finished("length", Usage(prompt=7, cached=0, completion=0)))
    assert (body["status"], body["incomplete_details"], body["store"]) == ("completed", None, False)
    assert context.responses.counts()["entries"] == 0


def test_another_tenant_finds_nothing():
    context, _ = new_context()
    name = answered(context)
    other = RequestContext(MODEL, b"other", SEAL, context.responses)
    with pytest.raises(NotFound):
        call_of(other, previous_response_id=name)
    with pytest.raises(NotFound):
        call_of(other, input=[{"type": "item_reference", "id": output_id(context, name)}])
    with pytest.raises(NotFound):
        stored_body(other.responses, other.tenant, name)
    with pytest.raises(NotFound):
        deletion_body(other.responses, other.tenant, name)


def output_id(context: RequestContext, name: str) -> str:
    output: Any = stored_body(context.responses, context.tenant, name)["output"]
    return output[0]["id"]


def test_a_reference_stands_for_an_item_and_outlives_it():
    context, _ = new_context()
    first = answered(context)
    for reference in ({"type": "item_reference"}, {}):
        item = {**reference, "id": output_id(context, first)}
        second = answered(context, input=[ASK, item])
        assert stored_body(context.responses, context.tenant, second)["status"] == "completed"
    deletion_body(context.responses, context.tenant, first)
    again = request_of(context, input="So?", previous_response_id=second).messages
    assert [message.content for message in again] == ["How deep?", "Hello", "Hello", "So?"], "two replies"
    with pytest.raises(NotFound) as missing:
        call_of(context, input=[ASK, {"type": "item_reference", "id": "gone"}])
    assert missing.value.param == "input[1].id"


def test_a_reference_to_an_id_that_a_client_has_chosen_finds_nobodys_text():
    """Two chats of one key may both number their messages."""
    context, _ = new_context()
    answered(context, input=[{**ASK, "id": "msg_1"}])
    with pytest.raises(NotFound):
        call_of(context, input=[ASK, {"type": "item_reference", "id": "msg_1"}])


def test_a_reference_finds_an_item_that_got_its_id_here_also_of_what_was_gone_on_from():
    context, _ = new_context()
    first = answered(context, input=[ASK])
    made: Any = context.responses.get(context.tenant, first).input[0]["id"]
    output = output_id(context, first)
    answered(context, input="Why?", previous_response_id=first)
    deletion_body(context.responses, context.tenant, first)
    items = [{"type": "item_reference", "id": name} for name in (made, output)]
    messages = request_of(context, input=items).messages
    assert [message.content for message in messages] == ["How deep?", "Hello"]


def test_a_conversation_of_references_stays_whole_though_the_responses_with_its_items_have_gone():
    """As the ai-sdk sends it: what the server has said is referred to in every later turn."""
    context, _ = new_context()
    history, names = list[Any](), list[str]()
    for turn in range(5):
        history.append({"role": "user", "content": f"Question {turn}?"})
        read = request_of(context, input=history).messages
        assert [message.role for message in read] == [*["user", "assistant"] * turn, "user"]
        names.append(answered(context, input=history))
        history.append({"type": "item_reference", "id": output_id(context, names[-1])})
        for gone in names[-2:-1]:
            deletion_body(context.responses, context.tenant, gone)


def test_an_item_that_several_turns_refer_to_is_listed_under_an_id_for_each():
    """With one id in several places, a client that reads page behind page would not come to the end."""
    context, _ = new_context()
    reference = {"type": "item_reference", "id": output_id(context, answered(context))}
    name = None
    for turn in range(3):
        more: dict[str, Any] = {"previous_response_id": name} if name else {}
        name = answered(context, input=[{**ASK, "content": f"{turn}?"}, reference], **more)
    pages, after = list[Any](), dict[str, Any]()
    while not pages or pages[-1]["has_more"]:
        query = Fields({"limit": "1", "order": "asc", **after})
        pages.append(input_items(context.responses, context.tenant, str(name), query))
        after = {"after": pages[-1]["last_id"]}
    texts = [page["data"][0]["content"][0]["text"] for page in pages]
    assert texts == ["0?", "Hello", "Hello", "1?", "Hello", "Hello", "2?", "Hello"]


def test_the_thoughts_of_a_second_reply_are_not_those_of_the_first():
    """As when a client asks again without a new item: ids and thoughts alone stand between the texts."""
    first, second = "A" * 24, "B" * 24
    thought: dict[str, Any] = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "So."}],
    }
    text = {"type": "message", "role": "assistant", "content": "Hello"}
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    named = [
        {**text, "id": f"msg_{first}"},
        {**thought, "id": f"rs_{second}"},
        {**text, "id": f"msg_{second}"},
    ]
    for items in (named, [text, thought, text]):
        replies = messages_of(*items, ASK)[:-1]
        assert [(reply.content, reply.reasoning) for reply in replies] == [("Hello", None), ("Hello", "So.")]
    other_call = messages_of(named[0], {**call, "id": f"fc_{second}"}, ASK)[:-1]
    assert [(reply.content, len(reply.tool_calls)) for reply in other_call] == [("Hello", 0), ("", 1)]


def test_thoughts_between_the_items_of_one_reply_stay_with_it():
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}
    text = {"type": "message", "role": "assistant", "content": "Hello"}
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    (reply, _) = messages_of(thought, text, thought, call, thought, ASK)
    assert (reply.content, reply.reasoning, len(reply.tool_calls)) == ("Hello", "So.So.So.", 1)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_client_sends_under_the_id_of_a_reply_is_not_found_in_its_place(is_first: bool):
    context, _ = new_context()
    name = output_id(context, answered(context))
    reference = {"type": "item_reference", "id": name}
    changed = {"type": "message", "role": "assistant", "id": name, "content": "changed"}
    both = [changed, ASK, reference] if is_first else [reference, ASK, changed]
    answered(context, input=[ASK, *both, ASK])
    messages = request_of(context, input=[ASK, reference, ASK]).messages
    assert [message.content for message in messages] == ["How deep?", "Hello", "How deep?"]


def test_a_response_puts_its_items_in_order_once_however_many_references_are_looked_up():
    context, _ = new_context()
    name = answered(context)
    kept = context.responses.get(context.tenant, name)
    assert context.responses.item(context.tenant, output_id(context, name), param="id")
    assert kept.made_items is kept.made_items


def test_a_reference_to_nothing_is_left_out_where_a_question_follows():
    context, _ = new_context()
    gone = {"type": "item_reference", "id": "gone"}
    assert [message.content for message in request_of(context, input=[gone, ASK]).messages] == ["How deep?"]


def test_an_error_behind_a_reference_to_nothing_names_the_item_of_the_request():
    gone = {"type": "item_reference", "id": "gone"}
    with pytest.raises(InvalidRequest) as refused:
        messages_of(gone, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]})
    assert refused.value.param == "input[1].content[0]"


def test_an_approval_is_a_question_so_a_reference_to_nothing_in_front_of_it_is_left_out():
    gone = {"type": "item_reference", "id": "gone"}
    approval = {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True}
    (message,) = messages_of(gone, approval)
    assert message.role == "user"


def test_the_reasoning_of_a_response_that_is_gone_on_from_is_read_exactly():
    context, _ = new_context()
    reply = call_of(context).reply
    _, end = events([0])
    reply.whole([Reasoning("\nHm.\n"), Content("Yes.")], end)
    (_, message, _) = request_of(context, previous_response_id=reply.id).messages
    assert (message.reasoning, message.content) == ("\nHm.\n", "Yes.")


def test_a_response_is_returned_and_deleted():
    context, _ = new_context()
    name = answered(context)
    lookup = (context.responses, context.tenant, name)
    assert (stored_body(*lookup)["id"], stored_body(*lookup)["status"]) == (name, "completed")
    assert deletion_body(*lookup) == {"id": name, "object": "response", "deleted": True}
    for again in (stored_body, deletion_body):
        with pytest.raises(NotFound):
            again(*lookup)


def test_a_count_is_an_object_of_its_own():
    assert input_token_count_body(5) == {"object": "response.input_tokens", "input_tokens": 5}
