"""Mends messages of Anthropic's protocol."""

from collections.abc import Mapping

from start_llm.core.chat import Json
from start_llm.protocols.anthropic.messages_input import ROLES
from start_llm.protocols.content import TOOL_REFERENCE, read_arguments
from start_llm.protocols.fields import Fields
from start_llm.protocols.mending import (
    Item,
    Mend,
    as_text,
    content_of,
    flag,
    is_name,
    listed,
    text,
    text_part,
    with_members,
)

_KINDS_OF_REPLIES = ("tool_use", "thinking", "redacted_thinking")


def role_of(message: Item) -> str | None:
    """Return the role of a message; if it names none, the one that its blocks suggest."""
    role = message.get("role")
    if isinstance(role, str) and role in ROLES:
        return role
    kinds = [block.get("type") for block in listed(message.get("content")) if isinstance(block, dict)]
    if any(kind in _KINDS_OF_REPLIES for kind in kinds):
        return "assistant"
    return "user" if "tool_result" in kinds else None


def mended_message(message: Item, role: str) -> Item:
    """Return a message that can be read. A block that cannot be becomes text."""
    return {**with_members(message, {"content": _CONTENT}), "role": role}


def _block(block: Json) -> Json:
    if not isinstance(block, dict) or not is_name(block.get("type")):
        return text_part(block)
    kind = as_text(block["type"])
    if kind in _NAMES and not is_name(block.get(_NAMES[kind])):
        return text_part(block)
    mended = with_members(block, _MEMBERS.get(kind, {}))
    return {**mended, "text": as_text(block.get("text"))} if kind == "text" else mended


def _input(value: Json) -> Json:
    """Mend the input of a call. Text is what the model wrote, where a client could not parse it."""
    if value is None or isinstance(value, dict):
        return value
    return dict(read_arguments(Fields({"arguments": as_text(value)})))


def _source(source: Json) -> Json:
    """Mend the source of a document."""
    if not isinstance(source, dict):
        return None
    return with_members(source, {"content": _CONTENT} if source.get("type") == "content" else {"data": text})


_CONTENT = content_of(_block)
_NAMES = {"tool_use": "name", TOOL_REFERENCE: "tool_name"}
"""The members without which blocks of these types cannot be read."""
_MEMBERS: Mapping[str, Mapping[str, Mend]] = {
    "tool_use": {"id": text, "input": _input},
    "tool_result": {"tool_use_id": text, "is_error": flag, "content": _CONTENT},
    "thinking": {"thinking": text, "signature": text},
    "redacted_thinking": {"data": text},
    "document": {"title": text, "context": text, "source": _source},
    "search_result": {"title": text, "source": text, "content": _CONTENT},
}
"""What mends the members of a block, by its type."""
