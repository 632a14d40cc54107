"""Converts the items of the Responses protocol to messages.

A reply consists of several items: reasoning, text, calls. They become one message again, as the client
received it. Two texts with nothing between them are two replies, and two messages, as in a chat.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from start_llm.core.chat import Json, KeptPlace, Message, Role, ToolCall
from start_llm.core.errors import NotFound
from start_llm.core.ids import RANDOM_LENGTH, name_in
from start_llm.protocols.base import new_id
from start_llm.protocols.content import read_arguments, read_content
from start_llm.protocols.custom_tools import custom_arguments
from start_llm.protocols.fields import Fields
from start_llm.protocols.image_parts import ImageParser, question_among
from start_llm.protocols.responses.built_in_calls import BUILT_IN_CALLS, BUILT_IN_OUTPUTS
from start_llm.protocols.responses.tools import Tell, Toolbox
from start_llm.protocols.seal import Sealed
from start_llm.protocols.tool_types import VENDOR_ITEMS, VENDOR_QUESTIONS, vendor_text

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
REFERENCE = "item_reference"

type Item = Mapping[str, Json]


def kind_of(item: Fields) -> str:
    """Return the type of an item. Messages and references may leave it out."""
    if item.value("type") is None:
        return "message" if item.value("role") is not None else REFERENCE
    return item.required_text("type")


def new_items(body: Fields, find: Callable[[str, str], Item]) -> list[Fields]:
    """Return the new items of a request: one text, or a list in which references are replaced by their items.

    Each has its path in the request. A reference to nothing is left out where a question follows: the client
    would send it with every turn.

    Args:
        find: returns an item by its id; its second argument is the path of the field; raises `NotFound`.

    Raises:
        NotFound: no question follows a reference to nothing.
    """
    value = body.value("input")
    if value is None:
        return []
    if isinstance(value, str):
        return [Fields({"type": "message", "role": "user", "content": value}, body.path_of("input"))]
    if not isinstance(value, list):
        raise body.expected("input", "a string or an array of items")
    items = list(body.objects("input"))
    question = max((at for at, item in enumerate(items) if _role_of(item) in ("user", "tool")), default=-1)
    read: list[Fields] = []
    for at, item in enumerate(items):
        try:
            read.append(_referred(item, find))
        except NotFound:
            if at > question:
                raise
            body.note_mended(item.path)
    return read


def _referred(item: Fields, find: Callable[[str, str], Item]) -> Fields:
    if kind_of(item) != REFERENCE:
        return item
    return Fields(find(item.required_text("id"), item.path_of("id")), item.path)


def _role_of(item: Fields) -> Json:
    """Return whose item it is: a message's role, `tool` for results, `assistant` for what a model wrote."""
    kind = item.value("type")
    if kind == "message" or (kind is None and item.value("role") is not None):
        return item.value("role")
    if not isinstance(kind, str):
        return "assistant"
    if kind in VENDOR_QUESTIONS:
        return "user"
    return "tool" if kind.endswith("_output") else "assistant"


def with_ids(items: Iterable[Item], made_items: Mapping[str, Item]) -> tuple[list[Item], list[str]]:
    """Return the items, each with an id that no other one has, and the ids that are new.

    An item gets a new one if it has none, and if another item has its id: one in front of it, or one of those
    whose ids this server has made.
    """
    with_id, new_ids, taken = list[Item](), list[str](), set[str]()
    for item in items:
        name = item.get("id")
        is_free = isinstance(name, str) and name and name not in taken and made_items.get(name, item) is item
        if not is_free:
            name = new_id("msg_")
            new_ids.append(name)
        taken.add(str(name))
        with_id.append(item if is_free else {**item, "id": name})
    return with_id, new_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemReader:
    """Reads the items of one request.

    Attributes:
        images: reads the images among the items.
        opened: opens reasoning that was sealed for this tenant; None for any other text.
        tell: prints a notice in the terminal about items that the model does not see.
        keep_s: seconds for which marked places are kept whose marks do not say.
    """

    toolbox: Toolbox
    images: ImageParser
    opened: Callable[[str], Sealed | None]
    tell: Tell
    keep_s: int | None = None

    def messages(self, items: Sequence[Fields]) -> tuple[Message, ...]:
        """Return the conversation.

        Raises:
            InvalidRequest: a malformed item, an unknown role, an image in the newest question that cannot
                be shown.
        """
        newest = question_among([_role_of(item) for item in items])
        read = (self._read(item, may_hold_unseen=at != newest) for at, item in enumerate(items))
        return tuple(_as_replies([message for message in read if message is not None]))

    def _read(self, item: Fields, *, may_hold_unseen: bool) -> Message | None:
        kind = kind_of(item)
        if kind == "message":
            return self._message(item, may_hold_unseen=may_hold_unseen)
        reader = _READERS.get(kind)
        if reader is None:
            self.tell(f"Items of type {kind!r} are not shown to the model.")
            return None
        return reader(self, item)

    def reasoning(self, item: Fields) -> Message | None:
        """Return sealed reasoning if it can be opened and was not edited, else the clear text.

        None if it is empty.
        """
        sealed = item.text("encrypted_content")
        clear = _texts(item, "content", between="") or _texts(item, "summary", between="\n\n")
        opened = self.opened(sealed) if sealed else None
        reasoning = opened.unless_edited(clear).reasoning if opened else clear
        reply = _of_reply(item, reasoning=reasoning) if reasoning else None
        return replace(reply, reply_name=opened.reply_name) if reply and opened else reply

    def call(self, item: Fields) -> Message:
        name = self.toolbox.flat(item.text("namespace"), item.required_text("name"))
        return _called(item, name, read_arguments(item))

    def custom_call(self, item: Fields) -> Message:
        name = self.toolbox.flat(item.text("namespace"), item.required_text("name"))
        return _called(item, name, custom_arguments(item))

    def built_in_call(self, item: Fields) -> Message:
        call = BUILT_IN_CALLS[kind_of(item)]
        return _called(item, call.tool, call.arguments(item))

    def built_in_result(self, item: Fields) -> Message:
        content = BUILT_IN_OUTPUTS[kind_of(item)](item)
        return Message(role="tool", content=content, tool_call_id=item.text("call_id") or item.text("id"))

    def computer_call(self, item: Fields) -> Message:
        members = {name: item.value(name) for name in ("action", "actions")}
        return _called(item, "computer", {name: value for name, value in members.items() if value})

    def screenshot(self, item: Fields) -> Message:
        output = item.object("output")
        content = self.images.read(output, is_refused=False) if output else ""
        return Message(role="tool", content=content, tool_call_id=item.text("call_id"))

    def vendor_item(self, item: Fields) -> Message:
        """Return the text of a call that the vendor ran, which no template has a form for."""
        kind = kind_of(item)
        text = vendor_text(kind, item.data)
        if kind in VENDOR_QUESTIONS:
            return Message(role="user", content=text)
        return _of_reply(item, content=text)

    def result(self, item: Fields) -> Message:
        content, kept = read_content(
            item, "output", images=self.images, may_hold_unseen=True, keep_s=self.keep_s
        )
        return Message(role="tool", content=content, tool_call_id=item.text("call_id"), kept=kept)

    def _message(self, item: Fields, *, may_hold_unseen: bool) -> Message:
        role = item.choice("role", ROLES)
        content, kept = read_content(
            item, images=self.images, may_hold_unseen=may_hold_unseen, keep_s=self.keep_s
        )
        if role == "assistant":
            return _of_reply(item, content=content, kept=kept)
        return Message(role=role, content=content, kept=kept)


_READERS: Mapping[str, Callable[[ItemReader, Fields], Message | None]] = {
    "reasoning": ItemReader.reasoning,
    "function_call": ItemReader.call,
    "function_call_output": ItemReader.result,
    "custom_tool_call": ItemReader.custom_call,
    "custom_tool_call_output": ItemReader.result,
    "computer_call": ItemReader.computer_call,
    "computer_call_output": ItemReader.screenshot,
    **dict.fromkeys(BUILT_IN_CALLS, ItemReader.built_in_call),
    **dict.fromkeys(BUILT_IN_OUTPUTS, ItemReader.built_in_result),
    **dict.fromkeys(VENDOR_ITEMS, ItemReader.vendor_item),
}


def _texts(item: Fields, name: str, *, between: str) -> str:
    return between.join(part.text("text") or "" for part in item.objects(name))


def _called(item: Fields, name: str, arguments: Mapping[str, Json]) -> Message:
    call = ToolCall(id=item.text("call_id") or "", name=name, arguments=arguments)
    return _of_reply(item, tool_calls=(call,))


def _of_reply(item: Fields, **parts: Any) -> Message:
    """Return an assistant message. Item ids end with the name of their response."""
    return Message(role="assistant", reply_name=name_in(item.text("id")), **parts)


def _as_replies(messages: Sequence[Message]) -> Iterator[Message]:
    """Merge the items of each reply. Nothing separated their texts, so they are joined directly."""
    reply: list[Message] = []
    last: Message | None = None
    for message, spoken in zip(messages, _spoken_from_each(messages), strict=True):
        if reply and not _is_same_reply(reply[0], last, message, spoken):
            yield reduce(_joined, reply)
            reply, last = [], None
        reply.append(message)
        last = last if _is_thought(message) else message
    if reply:
        yield reduce(_joined, reply)


def _spoken_from_each(messages: Sequence[Message]) -> list[Message | None]:
    """Return for each message the first one from there on that is more than thoughts."""
    spoken: list[Message | None] = [None]
    for message in reversed(messages):
        spoken.append(spoken[-1] if _is_thought(message) else message)
    return spoken[:0:-1]


def _is_thought(message: Message) -> bool:
    return message.role == "assistant" and not (message.content or message.tool_calls)


def _is_same_reply(first: Message, last: Message | None, message: Message, spoken: Message | None) -> bool:
    """Return whether an item belongs to the reply in front of it. Of two texts their ids must say so, also if
    there are thoughts between them: those are of the text behind them.

    Args:
        first: of that reply.
        last: of that reply, thoughts aside.
        spoken: what comes with the item, or behind it if these are thoughts.
    """
    if not first.role == message.role == "assistant":
        return False
    if len(first.reply_name) == len(message.reply_name) == RANDOM_LENGTH:
        return first.reply_name == message.reply_name
    are_texts = last and last.content and spoken and spoken.role == "assistant" and spoken.content
    return not are_texts


def _joined(reply: Message, more: Message) -> Message:
    return replace(
        reply,
        content=reply.content + more.content,
        reasoning=(reply.reasoning or "") + (more.reasoning or "") or None,
        tool_calls=(*reply.tool_calls, *more.tool_calls),
        reply_name=reply.reply_name or more.reply_name,
        kept=(*reply.kept, *(_behind(place, len(reply.content)) for place in more.kept)),
    )


def _behind(place: KeptPlace, characters: int) -> KeptPlace:
    return place._replace(characters=place.characters + characters)
