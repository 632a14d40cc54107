"""Converts OpenAI's `messages` and `tools` to our types."""

from collections.abc import Callable, Mapping, Sequence

from start_llm.core.chat import Json, Message, Role, TextGrammar, ToolCall, ToolSchemas
from start_llm.protocols.breakpoints import seconds_of_request, with_end_kept, with_tools_kept
from start_llm.protocols.content import TOOL_REFERENCE, begins_reply, read_arguments, read_content
from start_llm.protocols.custom_tools import custom_arguments, custom_grammar, custom_schema
from start_llm.protocols.fields import Fields
from start_llm.protocols.image_parts import ImageParser, question_among

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


_CUSTOM = "custom"
_TRANSPORT = ("defer_loading", "cache_control", "prompt_cache_breakpoint")
"""Members of a tool for the server, not for the model."""


def read_messages(body: Fields, images: ImageParser) -> tuple[Message, ...]:
    """Return the conversation, with system messages in the client's order.

    Raises:
        InvalidRequest: no messages, an unknown role, content that is neither text nor parts, an image in the
            newest question that cannot be shown.
    """
    items = list(body.objects("messages"))
    if not items:
        raise body.fail("messages", "must be an array with at least one message")
    images.make_room(body, items)
    question = question_among([item.value("role") for item in items])
    keep_s = seconds_of_request(body)
    messages = [
        _message(item, images, may_hold_unseen=index != question, keep_s=keep_s)
        for index, item in enumerate(items)
    ]
    return with_end_kept(with_tools_kept(messages, body.objects("tools")), keep_s)


def _message(item: Fields, images: ImageParser, *, may_hold_unseen: bool, keep_s: int | None) -> Message:
    role = item.choice("role", ROLES)
    content, kept = read_content(item, images=images, may_hold_unseen=may_hold_unseen, keep_s=keep_s)
    if role == "assistant":
        reasoning = item.text("reasoning_content") or item.text("reasoning")
        calls = _tool_calls(item)
        text = content or item.text("refusal") or ""  # OpenAI's replies have one of the two
        return Message(role=role, content=text, reasoning=reasoning, tool_calls=calls, kept=kept)
    if role == "tool":
        return Message(
            role=role,
            content=content,
            tool_call_id=item.text("tool_call_id" if item.value("role") == "tool" else "name"),
            tool_references=_tool_references(item),
            name=item.text("name"),
            kept=kept,
        )
    return Message(
        role=role,
        content=content,
        tool_references=_tool_references(item),
        name=item.text("name"),
        kept=kept,
    )


def _tool_references(item: Fields) -> tuple[str, ...]:
    """Return the late tools that a result refers to. Their schemas are shown in its place."""
    if not isinstance(item.value("content"), list):
        return ()
    references = [
        Fields(part, item.path_of(f"content[{index}]"))
        for index, part in enumerate(item.array("content"))
        if isinstance(part, dict) and part.get("type") == TOOL_REFERENCE
    ]
    return tuple(part.required_text("tool_name") for part in references)


def _tool_calls(item: Fields) -> tuple[ToolCall, ...]:
    """Return the calls, including the older `function_call`. It has no id, so its name is used as the id."""
    called = item.object("function_call")
    older = (_called(called, called.required_text("name")),) if called else ()
    return (*(_tool_call(call) for call in item.objects("tool_calls")), *older)


def _tool_call(call: Fields) -> ToolCall:
    custom = call.object("custom")
    if call.value("type") == _CUSTOM and custom:
        name = custom.required_text("name")
        return ToolCall(id=call.text("id") or "", name=name, arguments=custom_arguments(custom))
    return _called(call.required_object("function"), call.text("id") or "")


def _called(function: Fields, call_id: str) -> ToolCall:
    return ToolCall(id=call_id, name=function.required_text("name"), arguments=read_arguments(function))


def continues_reply(body: Fields, messages: Sequence[Message]) -> bool:
    """Return whether the reply is to go on from the last message, as vLLM's `continue_final_message` asks.

    Raises:
        InvalidRequest: it cannot, or the request also asks for a reply of its own.
    """
    if not body.boolean("continue_final_message"):
        return False
    if body.boolean("add_generation_prompt"):
        raise body.fail("add_generation_prompt", "must be false beside 'continue_final_message'")
    if not begins_reply(messages):
        raise body.fail(
            "continue_final_message", "needs a last message of the assistant that has text and no calls"
        )
    return True


def _schema(tool: Fields) -> dict[str, Json]:
    return {name: value for name, value in tool.data.items() if name not in _TRANSPORT}


def read_tools(body: Fields) -> tuple[ToolSchemas, ToolSchemas]:
    """Return function schemas as the client sent them, without fields for the server.

    A custom tool is a function with one text. Tools of other types are left out, because templates cannot
    express them. Tools with `defer_loading` come second. They are not part of the prefix, so adding one does
    not change it.
    """
    tools: list[Mapping[str, Json]] = []
    late: list[Mapping[str, Json]] = []
    for tool in body.objects("tools"):
        read = _TOOL_READERS.get(tool.required_text("type"))
        if read:
            (late if tool.boolean("defer_loading") else tools).append(read(tool))
    return tuple(tools), tuple(late)


def _function(tool: Fields) -> dict[str, Json]:
    function = tool.required_object("function")
    function.required_text("name")
    function.text("description")
    function.object("parameters")
    return {**_schema(tool), "function": _schema(function)}


def _custom(tool: Fields) -> dict[str, Json]:
    custom = tool.required_object(_CUSTOM)
    return {
        "type": "function",
        "function": {"name": custom.required_text("name"), **custom_schema(custom)},
    }


_TOOL_READERS: Mapping[str, Callable[[Fields], dict[str, Json]]] = {"function": _function, _CUSTOM: _custom}
OWN_TYPES = frozenset(_TOOL_READERS)
"""Types of the tools that the client runs."""


def read_custom_tools(body: Fields) -> Mapping[str, TextGrammar | None]:
    """Return the names of the custom tools, each with the grammar of its text."""
    tools = (tool.required_object(_CUSTOM) for tool in body.objects("tools") if tool.value("type") == _CUSTOM)
    return {tool.required_text("name"): custom_grammar(tool) for tool in tools}
