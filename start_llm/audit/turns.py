"""Measure the efficiency of six agent turns, as three kinds of clients send them.

The turns pass through the whole server except the engine, which `_ScriptedEngine` replaces.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from start_llm.audit.reply_message import message_from_events
from start_llm.audit.requests import tool
from start_llm.audit.subject import AuditedModel
from start_llm.config.settings import Settings
from start_llm.core.chat import ChatRequest, Json, Message, RequestOrigin, Thinking, ToolCall
from start_llm.core.common_beginning import common_length
from start_llm.core.engine_request import EngineRequest
from start_llm.core.errors import InvalidRequest
from start_llm.core.events import Event, Finished, Restored, Text, Usage
from start_llm.core.model_card import ModelCard
from start_llm.prompt.prepare import Preparer
from start_llm.serving.request_preparation import RequestPreparer
from start_llm.serving.service import Service
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.terminal import Terminal
from start_llm.wiring.from_settings import transcript_stores, transcripts

_WINDOW = 10**6
_WHERE: Json = {"type": "string"}
_MANY: Json = {"type": "number"}
_TOOLS = (
    tool("look", {"path": _WHERE, "depth": _MANY}),
    tool("write", {"path": _WHERE, "deep": {"type": "object"}}),
)
_LOOK = ToolCall("", "look", {"path": "größe.py", "depth": 1000.0})
_WRITE = ToolCall("", "write", {"path": "b.py", "deep": {"b": [1, None], "a": "\n"}})
_REPLIES = (
    Message(role="assistant", tool_calls=(_LOOK,)),
    Message(role="assistant", content="I write.", tool_calls=(_WRITE,)),
    Message(role="assistant", content="It is written."),
    Message(role="assistant", tool_calls=(_LOOK,)),
    Message(role="assistant", tool_calls=(_WRITE,)),
    Message(role="assistant", content="That is all."),
)
_ASKED = ChatRequest(
    messages=(
        Message(role="system", content="You work on files. Be brief, and say what you do."),
        Message(role="user", content="Look at größe.py, and write what you find."),
    ),
    tools=_TOOLS,
)

type Echo = Callable[[Message], Message]


def _respelt(message: Message) -> Message:
    """Reverse the order of members, and write whole floats as integers, as JavaScript does."""
    calls = (replace(call, arguments=_turned(call.arguments)) for call in message.tool_calls)
    return replace(message, tool_calls=tuple(calls))


def _turned(arguments: Mapping[str, Json]) -> dict[str, Json]:
    return {name: _without_point(arguments[name]) for name in reversed(list(arguments))}


def _without_point(value: Json) -> Json:
    return int(value) if isinstance(value, float) and value.is_integer() else value


CLIENTS: Mapping[str, Echo] = {
    "word for word": lambda message: message,
    "reasoning left out": lambda message: replace(message, reasoning=None),
    "arguments respelt": _respelt,
}


def efficiency(subject: AuditedModel, client: str, *, thinks: bool) -> float | None:
    """Play the six turns as a client sends them, and return unavoidable / computed prompt tokens.

    Unavoidable are tokens beyond the previous prompt and reply, which no server could know; computed those
    beyond the longest prefix that was computed before. Return None if the template refuses the conversation,
    or if a reply cannot be rendered or its calls cannot be parsed.
    """
    talk = _Talk(subject, thinks=thinks)
    try:
        return talk.efficiency() if all(talk.turn(reply, CLIENTS[client]) for reply in _REPLIES) else None
    except InvalidRequest:
        return None


class _Talk:
    """A growing conversation, and the token ids of all its prompts and replies."""

    def __init__(self, subject: AuditedModel, *, thinks: bool) -> None:
        self._subject = subject
        self._model = _ScriptedEngine(subject)
        self._service = _service(subject, self._model)
        self._request = replace(_ASKED, thinking=Thinking(on=thinks), conversation_id="audit")
        self._sequences: list[list[int]] = []
        self._unavoidable = self._computed = 0
        self._reasoning = "I think about it." if thinks and subject.family.reasoning else None

    def turn(self, message: Message, echo: Echo) -> bool:
        """Play one turn. False if the reply cannot be rendered, or if its calls are not parsed."""
        message = self._as_written(message)
        text = self._subject.written(self._request, message)
        if text is None:
            return False
        self._model.says = self._subject.tokenizer.encode(text, as_document=False)
        with self._service.respond(self._request, RequestOrigin("audit", "", "")) as answer:
            reply = message_from_events(list(answer.events()))
        self._count([*self._model.read], self._model.says)
        if len(reply.tool_calls) != len(message.tool_calls):
            return False
        back = echo(reply)
        self._request = replace(self._request, messages=(*self._request.messages, back, *_next(back)))
        return True

    def efficiency(self) -> float:
        return self._unavoidable / self._computed

    def _as_written(self, message: Message) -> Message:
        """Add the reasoning and call ids. Remove text beside calls, unless the template can show it."""
        turn, keeps_text = (
            len(self._sequences),
            self._subject.preparer.facts.text_beside_calls in ("kept", "set in"),
        )
        calls = tuple(replace(call, id=f"call{turn}") for call in message.tool_calls)
        content = message.content if keeps_text or not calls else ""
        return replace(message, content=content, reasoning=self._reasoning, tool_calls=calls)

    def _count(self, read: list[int], written: Sequence[int]) -> None:
        before = len(self._sequences[-1]) if self._sequences else 0
        known = max((common_length(read, sequence) for sequence in self._sequences), default=0)
        self._unavoidable += max(len(read) - before, 0)
        self._computed += len(read) - known
        self._sequences.append([*read, *written])


def _next(reply: Message) -> tuple[Message, ...]:
    results = [
        Message(role="tool", content=f"{call.name}: done, in 12 lines.", tool_call_id=call.id)
        for call in reply.tool_calls
    ]
    return tuple(results) or (Message(role="user", content="Now look at the other one."),)


class _ScriptedEngine:
    """A fake engine that records the prompt and returns a given reply.

    Attributes:
        says: token ids of the next reply.
        read: token ids of the last prompt.
    """

    def __init__(self, subject: AuditedModel) -> None:
        self._tokenizer = subject.tokenizer
        self.says: Sequence[int] = ()
        self.read: tuple[int, ...] = ()

    def submit(self, request: EngineRequest) -> _ScriptedEngine:
        self.read = request.prompt.ids
        return self

    def peek(self, request: EngineRequest) -> Restored:
        return Restored(0, repeated_tokens=request.repeated_tokens)

    def take(self, timeout_s: float) -> list[Event]:  # noqa: ARG002 - the interface
        text = b"".join(map(self._tokenizer.token_bytes, self.says)).decode(errors="replace")
        end = min(self._tokenizer.eos_token_ids, default=0)
        return [Text(text, tuple(self.says)), Text("", (end,)), Finished("stop", Usage(1, 0, 1))]

    def cancel(self, *, is_over: bool = False) -> None:
        """Do nothing: the reply is already complete."""


def _service(subject: AuditedModel, engine: _ScriptedEngine) -> Service:
    settings, tokenizer = Settings(), subject.tokenizer
    known = transcripts(settings, tokenizer, subject.family, transcript_stores(settings))
    card = ModelCard(id="audited", family=subject.family, vocabulary=_WINDOW, own_window=_WINDOW)
    preparer = Preparer(tokenizer, subject.family, restore_reasoning=known.restore_reasoning)
    return Service(
        engine=engine,
        requests=RequestPreparer(preparer, tokenizer, card),
        transcripts=known,
        reports=Reports(RequestMetrics(), Terminal(io.StringIO())),
    )
