"""Mends items of the Responses protocol."""

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
    text_part,
    with_members,
)
from start_llm.protocols.responses.built_in_calls import BUILT_IN_CALLS, BUILT_IN_OUTPUTS
from start_llm.protocols.responses.input import REFERENCE, ROLES
from start_llm.protocols.tool_types import VENDOR_ITEMS, VENDOR_QUESTIONS

_MESSAGE = "message"
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_OF_THE_USER = frozenset(
    {
        *_RESULTS,
        *BUILT_IN_OUTPUTS,
        "computer_call_output",
        *VENDOR_QUESTIONS,
    }
)
_OF_REFERENCES = frozenset({"id", "type"})
_SUGGESTING = {
    "role": _MESSAGE,
    "output": _RESULTS[0],
    "arguments": _CALLS[0],
    "summary": "reasoning",
    "encrypted_content": "reasoning",
    "content": _MESSAGE,
}
"""Members by which an item without a type is known."""


def role_of(item: Item) -> str | None:
    """Return whose item it is; None if nothing tells."""
    kind, role = _kind(item), item.get("role")
    if kind in _OF_THE_USER:
        return "user"
    if kind != _MESSAGE:
        return "assistant"
    return role if isinstance(role, str) and role in ROLES else None


def mended_item(item: Item, role: str) -> Item:
    """Return an item that can be read. One that cannot be becomes a message with its text."""
    kind = _kind(item)
    is_nameless = kind in _NAMES and not is_name(item.get(_NAMES[kind]))
    if is_nameless or (kind == _MESSAGE and "content" not in item):
        return {"type": _MESSAGE, "role": role, "content": [text_part(item)]}
    mended = with_members(item, _MEMBERS.get(kind, {}))
    if kind == _MESSAGE:
        mended["role"] = role
    return mended if is_name(item.get("type")) or _may_omit_type(item) else {**mended, "type": kind}


def _kind(item: Item) -> str:
    """Return the type of an item; if it names none, the one that its members suggest."""
    kind = item.get("type")
    if isinstance(kind, str) and kind:
        return kind
    if item.keys() <= _OF_REFERENCES:
        return REFERENCE
    return next((kind for member, kind in _SUGGESTING.items() if member in item), _MESSAGE)


def _may_omit_type(item: Item) -> bool:
    return item.get("type") is None and _kind(item) in (_MESSAGE, REFERENCE)


def _texts(value: Json) -> Json:
    """Mend the parts of reasoning."""
    return None if value is None else [_reasoning_part(part) for part in listed(value)]


def _reasoning_part(part: Json) -> Json:
    return with_members(part, {"text": text}) if isinstance(part, dict) else text_part(part)


def _object(value: Json) -> Json:
    return value if isinstance(value, dict) else None


def _outputs(value: Json) -> Json:
    """Mend what commands wrote: a text, or an object for each of them."""
    if not isinstance(value, list):
        return text(value)
    return [with_members(output, _OF_OUTPUTS) for output in value if isinstance(output, dict)]


_OF_OUTPUTS: Mapping[str, Mend] = {"stdout": text, "stderr": text, "outcome": _object}
_MEMBERS: Mapping[str, Mapping[str, Mend]] = {
    _MESSAGE: {"content": content_of(openai_part), "id": text},
    "reasoning": {"encrypted_content": text, "content": _texts, "summary": _texts, "id": text},
    "function_call": {"namespace": text, "arguments": arguments, "call_id": text, "id": text},
    "custom_tool_call": {"namespace": text, "input": text, "call_id": text, "id": text},
    **{kind: {"call_id": text, "output": content_of(openai_part), "id": text} for kind in _RESULTS},
    **{key: {"call_id": text, "id": text} for key in (*VENDOR_ITEMS, "computer_call")},
    "computer_call_output": {"call_id": text, "id": text, "output": _object},
    **{kind: {"call_id": text, "id": text, call.member: _object} for kind, call in BUILT_IN_CALLS.items()},
    **{kind: {"call_id": text, "id": text, "output": _outputs} for kind in BUILT_IN_OUTPUTS},
}
"""What mends the members of an item, by its type."""
_NAMES = {**dict.fromkeys(_CALLS, "name"), REFERENCE: "id"}
"""The members without which items of these types cannot be read."""
