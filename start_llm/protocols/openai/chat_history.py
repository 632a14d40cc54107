"""Mends messages of a chat."""

from collections.abc import Mapping

from start_llm.core.chat import Json
from start_llm.protocols.mending import (
    Item,
    Mend,
    arguments,
    content_of,
    is_name,
    listed,
    openai_part,
    text,
    with_members,
    with_texts,
)
from start_llm.protocols.openai.chat_input import ROLES


def role_of(message: Item) -> str | None:
    """Return the role of a message; if it names none, the one that its members suggest."""
    role = message.get("role")
    if isinstance(role, str) and role in ROLES:
        return role
    if message.get("tool_calls") or message.get("reasoning_content"):
        return "assistant"
    return "tool" if message.get("tool_call_id") else None


def mended_message(message: Item, role: str) -> Item:
    """Return a message that can be read. A call that names no function becomes text of it."""
    lost = [call for call in listed(message.get("tool_calls")) if _call(call) is None]
    older = message.get("function_call")
    if older is not None and _function(older) is None:
        lost.append(older)
    return with_texts({**with_members(message, _MEMBERS), "role": role}, lost)


def _calls(value: Json) -> Json:
    if value is None:
        return None
    return [call for call in map(_call, listed(value)) if call is not None]


def _call(call: Json) -> Json:
    """Return a call, None if it names neither a function nor a custom tool."""
    if not isinstance(call, dict):
        return None
    function, custom = _function(call.get("function")), _custom(call.get("custom"))
    if not (function or custom):
        return None
    is_custom = bool(custom) and (call.get("type") == "custom" or not function)
    mended = with_members(call, {"id": text, "function": _function, "custom": _custom})
    return (
        {**mended, "type": "custom" if is_custom else "function"} if "type" in call or is_custom else mended
    )


def _function(function: Json) -> Json:
    """Return a function, None without a name."""
    if isinstance(function, dict) and is_name(function.get("name")):
        return with_members(function, {"arguments": arguments})
    return None


def _custom(tool: Json) -> Json:
    """Return the custom tool of a call, None without a name."""
    return (
        with_members(tool, {"input": text}) if isinstance(tool, dict) and is_name(tool.get("name")) else None
    )


_MEMBERS: Mapping[str, Mend] = {
    "content": content_of(openai_part),
    "refusal": text,
    "reasoning_content": text,
    "reasoning": text,
    "tool_call_id": text,
    "name": text,
    "tool_calls": _calls,
    "function_call": _function,
}
