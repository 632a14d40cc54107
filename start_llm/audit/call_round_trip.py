"""Test that the output splitter parses tool calls in the form in which the chat template renders them."""

from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.audit.reply_message import message_from_events
from start_llm.audit.requests import tool
from start_llm.audit.subject import AuditedModel
from start_llm.core.chat import ChatRequest, Json, Message, Thinking, ToolCall
from start_llm.core.errors import InvalidRequest
from start_llm.core.events import Finished, Text, Usage
from start_llm.core.family import Family
from start_llm.formats.reading.schema import Tools
from start_llm.formats.registry import NOTATIONS, all_notations
from start_llm.output.splitter import make_splitter
from start_llm.output.stream import OutputStream
from start_llm.prompt.template_audit.facts import TemplateFacts

_TOOLS = (
    tool("look", {"path": {"type": "string"}}),
    tool(
        "write",
        {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "deep": {"type": "object"},
            "lines": {"type": "array"},
            "flag": {"type": "boolean"},
        },
    ),
    tool("now", {}),
)
_ASKED = ChatRequest(
    messages=(Message(role="system", content="Be brief."), Message(role="user", content="How deep is it?")),
    tools=_TOOLS,
    thinking=Thinking(on=False),
)
_CODE = "def depth(x):\n\treturn \"\\n\" + x[0]  # <b> & 'größe'\n"
_LOOK = ToolCall("c1", "look", {"path": "a.py"})
_REPLIES: Mapping[str, tuple[str, tuple[ToolCall, ...]]] = {
    "a call": ("", (_LOOK,)),
    "code": ("", (ToolCall("c1", "look", {"path": _CODE}),)),
    "values of all types": (
        "",
        (
            ToolCall(
                "c1",
                "write",
                {
                    "text": "5",
                    "count": -3,
                    "deep": {"a": [1, None, {"b": "c"}], "d": True},
                    "lines": ["one", {"two": [3]}],
                    "flag": False,
                },
            ),
        ),
    ),
    "no arguments": ("", (ToolCall("c1", "now", {}),)),
    "two calls": ("", (_LOOK, ToolCall("c2", "look", {"path": "b.py"}))),
    "text and a call": ("I look.", (_LOOK,)),
}


@dataclass(frozen=True, slots=True)
class CallAudit:
    """The result of parsing rendered calls.

    Attributes:
        notation: the name of the notation of a call; None if a single call is not parsed.
        sample: a single call as the template renders it; empty if the template renders none.
        read: kinds of replies that are parsed correctly.
        unread: kinds that are not.
        unrendered: kinds that the template cannot render as one reply.
    """

    notation: str | None
    sample: str
    read: tuple[str, ...]
    unread: tuple[str, ...]
    unrendered: tuple[str, ...]


def audit_calls(subject: AuditedModel) -> CallAudit:
    """Render every kind of reply with the template, and parse it with the reader of this family."""
    rendered = {kind: _rendered(subject, kind) for kind in _kinds(subject.preparer.facts)}
    read = [kind for kind, text in rendered.items() if text is not None and _is_read(subject, kind, text)]
    unrendered = [kind for kind in _REPLIES if rendered.get(kind) is None]
    first = rendered["a call"] or ""
    return CallAudit(
        notation=_notation(subject.family, first) if "a call" in read else None,
        sample=first,
        read=tuple(read),
        unread=tuple(kind for kind in rendered if kind not in (*read, *unrendered)),
        unrendered=tuple(unrendered),
    )


def unread_call(subject: AuditedModel) -> str | None:
    """Return a call as the template renders it, if no reader parses it; else None.

    Text beside it does not count: some templates write results into the same turn.
    """
    if not subject.tokenizer.has_chat_template:
        return None
    text = _rendered(subject, "a call")
    return text if text and not _reads_calls(subject, "a call", text) else None


def _kinds(facts: TemplateFacts) -> list[str]:
    shown = {
        "two calls": facts.takes_parallel_calls,
        "text and a call": facts.text_beside_calls in ("kept", "set in"),
    }
    return [kind for kind in _REPLIES if shown.get(kind, True)]


def _rendered(subject: AuditedModel, kind: str) -> str | None:
    content, calls = _REPLIES[kind]
    reply = Message(role="assistant", content=content, tool_calls=calls)
    try:
        return subject.written(_ASKED, reply)
    except InvalidRequest:
        return None


def _is_read(subject: AuditedModel, kind: str, text: str) -> bool:
    content, _ = _REPLIES[kind]
    return _understood(subject, text).content.strip() == content and _reads_calls(subject, kind, text)


def _reads_calls(subject: AuditedModel, kind: str, text: str) -> bool:
    _, calls = _REPLIES[kind]
    return list(map(_plain, _understood(subject, text).tool_calls)) == list(map(_plain, calls))


def _plain(call: ToolCall) -> tuple[str, Json]:
    return call.name, _without_null(dict(call.arguments))


def _without_null(value: Json) -> Json:
    """Return a value with empty texts for null, for which some templates write nothing."""
    if isinstance(value, dict):
        return {name: _without_null(member) for name, member in value.items()}
    if isinstance(value, list):
        return list(map(_without_null, value))
    return "" if value is None else value


def _understood(subject: AuditedModel, text: str) -> Message:
    prompt = subject.prompt(_ASKED)
    splitter = make_splitter(
        subject.family, Tools(_TOOLS), reasoning_is_open=prompt.reasoning_is_open, thinking=prompt.thinking
    )
    stream = OutputStream(splitter)
    events = stream.feed(Text(text, (0,)))
    rest, _ = stream.close(Finished("stop", Usage(1, 0, 1)))
    return message_from_events([*events, *rest])


def _notation(family: Family, call: str) -> str:
    """Return the name of the notation that a call is written in."""
    texts = {notation.name: notation.text for notation in all_notations(family.formats)}
    names = (name for name, text in texts.items() if text and text.mark and text.mark in call)
    return family.name if family.channels else next(names, next(iter(family.formats or NOTATIONS)))
