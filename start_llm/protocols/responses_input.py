"""The items of the Responses protocol, read into messages.

A reply comes as several items: thought, text, calls. Those of the assistant that follow each other are one
message, so that what a client sends back is what it was answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from start_llm.core.chat import Json, Message, Role, ToolCall
from start_llm.core.ids import name_in
from start_llm.protocols.base import new_id
from start_llm.protocols.content import read_arguments, read_content
from start_llm.protocols.fields import Fields
from start_llm.protocols.responses_tools import CUSTOM_ARGUMENT, Tell, Toolbox
from start_llm.protocols.seal import Sealed

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_REFERENCE = "item_reference"

type Item = Mapping[str, Json]


def kind_of(item: Fields) -> str:
    """The type of an item, which messages and references may leave out."""
    if item.value("type") is None:
        return "message" if item.value("role") is not None else _REFERENCE
    return item.required_text("type")


def new_items(body: Fields, find: Callable[[str, str], Item]) -> list[Item]:
    """What a request adds: a text, or items; those that it refers to stand in the place of their references.

    Args:
        find: an item by its id, for the field that names it; raises `NotFound`.
    """
    value = body.value("input")
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise body.expected("input", "a string or an array of items")
    return [
        find(item.required_text("id"), item.path_of("id")) if kind_of(item) == _REFERENCE else item.data
        for item in body.objects("input")
    ]


def with_ids(items: Iterable[Item]) -> list[Item]:
    """Clients may leave out the ids of what they send; in a list each item needs one."""
    return [item if item.get("id") else {**item, "id": new_id("msg_")} for item in items]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemReader:
    """Reads the items of one request.

    Attributes:
        opened: the thought that was sealed for this tenant; None if it was not.
        tell: what cannot be shown to the model is told to the terminal.
    """

    toolbox: Toolbox
    opened: Callable[[str], Sealed | None]
    tell: Tell

    def messages(self, items: Sequence[Fields]) -> tuple[Message, ...]:
        """The conversation.

        Raises:
            InvalidRequest: an item that is none, an unknown role, an image in the newest user message.
        """
        newest = max((at for at, item in enumerate(items) if item.value("role") == "user"), default=-1)
        read = (self._read(item, may_hold_images=at != newest) for at, item in enumerate(items))
        return tuple(_as_replies(message for message in read if message is not None))

    def _read(self, item: Fields, *, may_hold_images: bool) -> Message | None:
        kind = kind_of(item)
        if kind == "message":
            return _message(item, may_hold_images=may_hold_images)
        reader = _READERS.get(kind)
        if reader is None:
            self.tell(f"Items of type {kind!r} are not shown to the model.")
            return None
        return reader(self, item)

    def reasoning(self, item: Fields) -> Message | None:
        """A thought: as it was sealed, else as it is told; none if it is empty."""
        sealed = item.text("encrypted_content")
        clear = _texts(item, "content", between="") or _texts(item, "summary", between="\n\n")
        opened = self.opened(sealed) if sealed else None
        thought = opened.thought if opened and opened.thought else clear
        reply = _of_reply(item, reasoning=thought) if thought else None
        return replace(reply, reply_name=opened.reply_name) if reply and opened else reply

    def call(self, item: Fields) -> Message:
        name = self.toolbox.flat(item.text("namespace"), item.required_text("name"))
        return _called(item, name, read_arguments(item))

    def custom_call(self, item: Fields) -> Message:
        name = self.toolbox.flat(item.text("namespace"), item.required_text("name"))
        return _called(item, name, {CUSTOM_ARGUMENT: item.text("input") or ""})

    def result(self, item: Fields) -> Message:
        content = read_content(item, "output", may_hold_images=True)
        return Message(role="tool", content=content, tool_call_id=item.text("call_id"))


_READERS: Mapping[str, Callable[[ItemReader, Fields], Message | None]] = {
    "reasoning": ItemReader.reasoning,
    "function_call": ItemReader.call,
    "function_call_output": ItemReader.result,
    "custom_tool_call": ItemReader.custom_call,
    "custom_tool_call_output": ItemReader.result,
}


def _message(item: Fields, *, may_hold_images: bool) -> Message:
    name = item.required_text("role")
    role = _ROLES.get(name)
    if role is None:
        raise item.fail("role", f"is {name!r}; it must be one of {', '.join(_ROLES)}")
    content = read_content(item, may_hold_images=may_hold_images)
    return _of_reply(item, content=content) if role == "assistant" else Message(role=role, content=content)


def _texts(item: Fields, name: str, *, between: str) -> str:
    return between.join(part.text("text") or "" for part in item.objects(name))


def _called(item: Fields, name: str, arguments: Mapping[str, Json]) -> Message:
    call = ToolCall(id=item.text("call_id") or "", name=name, arguments=arguments)
    return _of_reply(item, tool_calls=(call,))


def _of_reply(item: Fields, **parts: Any) -> Message:
    """Its id tells which: those of items end with the name of the response that they were told in."""
    return Message(role="assistant", reply_name=name_in(item.text("id")), **parts)


def _as_replies(messages: Iterable[Message]) -> Iterable[Message]:
    """Neighbours of the assistant as one, their texts joined with nothing: nothing stood between them."""
    reply: Message | None = None
    for message in messages:
        if message.role == "assistant":
            reply = _joined(reply, message) if reply else message
            continue
        if reply:
            yield reply
            reply = None
        yield message
    if reply:
        yield reply


def _joined(reply: Message, more: Message) -> Message:
    return replace(
        reply,
        content=reply.content + more.content,
        reasoning=(reply.reasoning or "") + (more.reasoning or "") or None,
        tool_calls=(*reply.tool_calls, *more.tool_calls),
        reply_name=reply.reply_name or more.reply_name,
    )
