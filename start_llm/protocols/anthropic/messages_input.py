"""Converts Anthropic's `system`, `messages`, `tools` and constraints of the output to our types.

Unknown parts are not refused, because clients react to a refusal by changing their prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from start_llm.core.chat import (
    Json,
    JsonAnswer,
    KeptPlace,
    Message,
    OutputConstraint,
    ToolCall,
    ToolSchemas,
    tool_names,
)
from start_llm.protocols.breakpoints import (
    WHOLE,
    places,
    seconds_of,
    seconds_of_request,
    with_end_kept,
    with_tools_kept,
)
from start_llm.protocols.content import TOOL_REFERENCE, MarkedText, text_or_note
from start_llm.protocols.fields import Fields
from start_llm.protocols.image_parts import ImageParser, question_among
from start_llm.protocols.seal import Sealed
from start_llm.protocols.tool_types import anthropic_tool_type, is_vendor_block, vendor_text

type Opener = Callable[[str], Sealed | None]
"""Returns the contents of our signature; None if we did not create it."""
_BETWEEN_SYSTEM_BLOCKS = "\n\n"
"""Begins each block on a new line, because a client's block may end without a line break (lesson 18)."""
_BETWEEN_BLOCKS_OF_A_RESULT = "\n"
"""The tool returned them as separate blocks."""
_FAILED = "[The call failed]\n"
_TEXT, _IMAGE, _CALL, _RESULT = "text", "image", "tool_use", "tool_result"
_CLEAR_REASONING, _HIDDEN_REASONING = "thinking", "redacted_thinking"
_FUNCTION_TYPES = (None, "custom")


def read_conversation(body: Fields, open_reasoning: Opener, images: ImageParser) -> tuple[Message, ...]:
    """Return the system text and the messages, in the client's order.

    Raises:
        InvalidRequest: no messages, an unknown role, content that is neither text nor blocks, an image in
            the newest question that cannot be shown.
    """
    items = list(body.objects("messages"))
    if not items:
        raise body.fail("messages", "must be an array with at least one message")
    images.make_room(body, items)
    newest = question_among([item.value("role") for item in items])
    reading = _Reading(open_reasoning, images)
    read = (
        message
        for index, item in enumerate(items)
        for message in _messages(item, replace(reading, is_newest_user=index == newest))
    )
    messages = with_tools_kept((*_system(body, reading), *read), body.objects("tools"))
    return with_end_kept(messages, seconds_of_request(body))


def read_tools(body: Fields) -> tuple[ToolSchemas, ToolSchemas]:
    """Return function schemas in the format of chat templates. Tools that Anthropic runs are left out.

    Anthropic's client tools have their published schemas. Tools with `defer_loading` come second. They are
    not part of the prefix, so adding one does not change it.
    """
    tools: list[Mapping[str, Json]] = []
    late: list[Mapping[str, Json]] = []
    for tool in body.objects("tools"):
        schema = _function(tool) if tool.text("type") in _FUNCTION_TYPES else _client_tool(tool)
        if schema is not None:
            (late if tool.boolean("defer_loading") else tools).append(schema)
    return tuple(tools), tuple(late)


def _client_tool(tool: Fields) -> dict[str, Json] | None:
    """Return the schema of a tool that Anthropic defines and the client runs; None if Anthropic runs it."""
    kind = anthropic_tool_type(tool.required_text("type"))
    if kind.runs != "client":
        return None
    schema = kind.schema
    width, height = tool.value("display_width_px"), tool.value("display_height_px")
    if width is not None and height is not None:
        schema["description"] = f"{kind.description} The screen has {width} x {height} pixels."
    return {"type": "function", "function": {"name": tool.text("name") or kind.name, **schema}}


def _function(tool: Fields) -> dict[str, Json]:
    function: dict[str, Json] = {"name": tool.required_text("name")}
    description, schema = tool.text("description"), tool.object("input_schema")
    if description is not None:
        function["description"] = description
    if schema is not None:
        function["parameters"] = dict(schema.data)
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reads the blocks of a message.

    Attributes:
        is_newest_user: the message is the newest one of the user.
        refuses_images: an image that cannot be shown is refused; otherwise it becomes a note.
    """

    open_reasoning: Opener
    images: ImageParser
    is_newest_user: bool = False
    refuses_images: bool = False

    def joined(self, blocks: Sequence[Fields]) -> str:
        """Return the joined text: blocks are equivalent to one string."""
        return self.content(blocks).text

    def content(self, blocks: Sequence[Fields]) -> MarkedText:
        """Return the joined text, and the places up to which it is to be kept."""
        texts = list(map(self.text_of, blocks))
        return MarkedText("".join(texts), places(texts, _marks(blocks)))

    def text_of(self, block: Fields) -> str:
        """Return the text of a block for the model."""
        kind = block.required_text("type")
        if kind == _IMAGE:
            return self.images.read(block, is_refused=self.refuses_images)
        if is_vendor_block(kind):
            return vendor_text(kind, block.data)
        read = _TEXTS.get(kind)
        return read(block, self) if read is not None else text_or_note(block, kind)


def _messages(item: Fields, reading: _Reading) -> Iterator[Message]:
    read = item.choice("role", ROLES)
    return read(_blocks(item, "content"), reading)


def _system(body: Fields, reading: _Reading) -> Iterator[Message]:
    """Yield one message for all blocks of the system text."""
    blocks = _blocks(body, "system")
    texts = [reading.text_of(block) for block in blocks]
    if any(texts):
        between = (
            _BETWEEN_SYSTEM_BLOCKS if text and any(texts[:at]) else "" for at, text in enumerate(texts)
        )
        apart = list(map(add, between, texts))
        yield Message(role="system", content="".join(apart), kept=places(apart, _marks(blocks)))


def _system_in_place(blocks: Sequence[Fields], reading: _Reading) -> Iterator[Message]:
    text, kept = reading.content(blocks)
    yield Message(role="system", content=text, kept=kept)


def _question(blocks: Sequence[Fields], reading: _Reading) -> Iterator[Message]:
    """Yield a message per tool result, in the order sent, then the user's text."""
    results, content = _parted(blocks, _RESULT)
    for result in results:
        yield _result(result, reading)
    refusing = replace(reading, refuses_images=reading.is_newest_user and not results)
    text, kept = refusing.content(content)
    if text or not results:
        yield Message(role="user", content=text, kept=kept)


def _result(block: Fields, reading: _Reading) -> Message:
    blocks = _blocks(block, "content")
    failed = _FAILED if block.boolean("is_error") else ""
    references, _ = _parted(blocks, TOOL_REFERENCE)
    return Message(
        role="tool",
        content=failed + _BETWEEN_BLOCKS_OF_A_RESULT.join(filter(None, map(reading.text_of, blocks))),
        tool_call_id=block.text("tool_use_id"),
        tool_references=tuple(reference.required_text("tool_name") for reference in references),
        kept=_whole([block, *blocks]),
    )


def _reply(blocks: Sequence[Fields], reading: _Reading) -> Iterator[Message]:
    """Yield one message. Only calls separated the texts of the reply, so they are joined directly."""
    calls, others = _parted(blocks, _CALL)
    reasoning_texts, content = _parted(others, _CLEAR_REASONING, _HIDDEN_REASONING)
    opened = [_reasoning(block, reading.open_reasoning) for block in reasoning_texts]
    text, kept = reading.content(content)
    yield Message(
        role="assistant",
        content=text,
        reasoning="".join(sealed.reasoning for sealed in opened) or None,
        tool_calls=tuple(map(_call, calls)),
        reply_name=next((sealed.reply_name for sealed in opened if sealed.reply_name), ""),
        kept=(*kept, *_whole(calls)),
    )


ROLES: Mapping[str, Callable[[Sequence[Fields], _Reading], Iterator[Message]]] = {
    "user": _question,
    "assistant": _reply,
    "system": _system_in_place,
    "developer": _system_in_place,
}


def _call(block: Fields) -> ToolCall:
    arguments = block.object("input")
    return ToolCall(
        id=block.text("id") or "",
        name=block.required_text("name"),
        arguments=arguments.data if arguments else {},
    )


def _reasoning(block: Fields, open_reasoning: Opener) -> Sealed:
    """Return the sealed reasoning if the signature is ours and the client has not edited it.

    Otherwise return the client's text. Reasoning hidden by another server cannot be read.
    """
    is_hidden = block.value("type") == _HIDDEN_REASONING
    clear = "" if is_hidden else block.text("thinking") or ""
    sealed = open_reasoning(block.text("data" if is_hidden else "signature") or "")
    return sealed.unless_edited(clear) if sealed else Sealed(clear, "")


# ------------------------------------------------------------------------------------------------- blocks


def _marks(blocks: Sequence[Fields]) -> list[int | None]:
    return [seconds_of(block.data) for block in blocks]


def _whole(blocks: Sequence[Fields]) -> tuple[KeptPlace, ...]:
    """Return a place at the end of the message if one of these blocks, which are no part of its text, is
    marked.
    """
    seconds = max((kept or 0 for kept in _marks(blocks)), default=0)
    return (KeptPlace(WHOLE, seconds),) if seconds else ()


def _blocks(holder: Fields, name: str) -> list[Fields]:
    """Return the blocks of a content. A string is one text block."""
    value = holder.value(name)
    if isinstance(value, str):
        return [Fields({"type": _TEXT, "text": value}, holder.path_of(name))]
    if value is not None and not isinstance(value, list):
        raise holder.expected(name, "a string or an array of blocks")
    return list(holder.objects(name))


def _parted(blocks: Sequence[Fields], *kinds: str) -> tuple[list[Fields], list[Fields]]:
    """Return the blocks of these types, and the others."""
    chosen = [block for block in blocks if block.required_text("type") in kinds]
    return chosen, [block for block in blocks if block.value("type") not in kinds]


def _document(block: Fields, reading: _Reading) -> str:
    """Return the document on separate lines: title, context and text."""
    source = block.object("source")
    title = block.text("title")
    text = _source_text(source, reading) if source else None
    if text is None:
        return f"[document{f' {title}' if title else ''}: this model reads text alone]\n"
    lines = [f"[document{f': {title}' if title else ''}]", block.text("context"), text]
    return "".join(f"{line}\n" for line in lines if line)


def _source_text(source: Fields, reading: _Reading) -> str | None:
    """Return the text of a source, or None if it has none."""
    match source.value("type"):
        case "text":
            return source.text("data") or ""
        case "content":
            return reading.joined(_blocks(source, "content"))
        case _:
            return None


def _search_result(block: Fields, reading: _Reading) -> str:
    lines = [
        f"[search result: {block.text('title') or ''}]",
        block.text("source"),
        reading.joined(_blocks(block, "content")),
    ]
    return "".join(f"{line}\n" for line in lines if line)


_TEXTS: Mapping[str, Callable[[Fields, _Reading], str]] = {
    _TEXT: lambda block, _: block.given_text("text"),
    TOOL_REFERENCE: lambda *_: "",
    "document": _document,
    "search_result": _search_result,
}


_OLDER_NAME = "output_format"


def read_form(body: Fields, tools: ToolSchemas, *, runs_elsewhere: bool) -> OutputConstraint:
    """Return the output constraint. Unknown kinds of choice or format are ignored.

    Args:
        runs_elsewhere: the chosen tool is one of Anthropic's server tools, which cannot be called here.

    Raises:
        InvalidRequest: names a chosen tool that is not offered, or a format without a schema.
    """
    choice = body.object("tool_choice")
    answer = _answer(body)
    if choice is None or not tools:
        return OutputConstraint(answer=answer)
    one_call = choice.boolean("disable_parallel_tool_use")
    match choice.text("type"):
        case "none":
            return OutputConstraint(answer=answer, calls="none")
        case "any":
            return OutputConstraint(answer=answer, calls="must", one_call=one_call)
        case "tool" if not runs_elsewhere:
            chosen = frozenset([_chosen(choice, tools)])
            return OutputConstraint(answer=answer, calls="must", tools=chosen, one_call=one_call)
        case _:
            return OutputConstraint(answer=answer, one_call=one_call)


def _chosen(choice: Fields, tools: ToolSchemas) -> str:
    name = choice.required_text("name")
    if name not in tool_names(tools):
        raise choice.fail("name", f"is {name!r}, and no such tool is offered")
    return name


def _answer(body: Fields) -> JsonAnswer | None:
    """Read the answer's schema. The older field is from a beta; if both are set, the newer one counts."""
    config = body.object("output_config")
    form = (config.object("format") if config else None) or body.object(_OLDER_NAME)
    if form is None or form.text("type") != "json_schema":
        return None
    schema = form.required_object("schema")
    return JsonAnswer(schema=schema.data, field=schema.path)
