"""Six turns of an agent, as three kinds of clients send them, through all of a server but its engine."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from start_llm.audit.hearing import heard
from start_llm.audit.requests import tool
from start_llm.audit.subject import Subject
from start_llm.configured import transcripts
from start_llm.core.chat import ChatRequest, Json, Message, Origin, Thinking, ToolCall
from start_llm.core.errors import InvalidRequest
from start_llm.core.events import Event, Finished, Restored, Text, Usage
from start_llm.core.job import Job
from start_llm.prompt.prepare import Preparer
from start_llm.service import ModelTraits, Service
from start_llm.settings import Settings
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.terminal import Terminal

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
    """Members in another order, and whole numbers without a point, as JavaScript writes them."""
    calls = (replace(call, arguments=_turned(call.arguments)) for call in message.tool_calls)
    return replace(message, tool_calls=tuple(calls))


def _turned(arguments: Mapping[str, Json]) -> dict[str, Json]:
    return {name: _without_point(arguments[name]) for name in reversed(list(arguments))}


def _without_point(value: Json) -> Json:
    return int(value) if isinstance(value, float) and value.is_integer() else value


CLIENTS: Mapping[str, Echo] = {
    "word for word": lambda message: message,
    "thoughts left out": lambda message: replace(message, reasoning=None),
    "arguments respelt": _respelt,
}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Of a client's prompts: tokens that no server could know, and those that nobody has computed before."""

    unavoidable: int
    computed: int

    @property
    def share(self) -> float:
        return self.unavoidable / self.computed


def efficiency(subject: Subject, client: str, *, thinks: bool) -> Efficiency | None:
    """None if the template refuses the conversation, or if its replies cannot be told or their calls read."""
    talk = _Talk(subject, thinks=thinks)
    try:
        return talk.efficiency() if all(talk.turn(reply, CLIENTS[client]) for reply in _REPLIES) else None
    except InvalidRequest:
        return None


class _Talk:
    """A conversation that grows, and all token ids that were computed for it."""

    def __init__(self, subject: Subject, *, thinks: bool) -> None:
        self._subject = subject
        self._model = _Script(subject)
        self._service = _service(subject, self._model)
        self._request = replace(_ASKED, thinking=Thinking(on=thinks), conversation_id="audit")
        self._sequences: list[Sequence[int]] = []
        self._unavoidable = self._computed = 0
        self._thought = "I think about it." if thinks and subject.family.thought else None

    def turn(self, message: Message, echo: Echo) -> bool:
        """Whether the template tells what the model writes, and its calls are read."""
        message = self._as_written(message)
        said = self._subject.written(self._request, message)
        if said is None:
            return False
        self._model.says = self._subject.tokenizer.encode(said, as_document=False)
        with self._service.respond(self._request, Origin("audit", "", "")) as answer:
            told = heard(list(answer.events()))
        self._count([*self._model.read], self._model.says)
        if len(told.tool_calls) != len(message.tool_calls):
            return False
        back = echo(told)
        self._request = replace(self._request, messages=(*self._request.messages, back, *_next(back)))
        return True

    def efficiency(self) -> Efficiency:
        return Efficiency(self._unavoidable, self._computed)

    def _as_written(self, message: Message) -> Message:
        """With a thought, an id for each call, and text beside it only where the template shows that."""
        turn, keeps_text = (
            len(self._sequences),
            self._subject.preparer.facts.text_beside_calls in ("kept", "set in"),
        )
        calls = tuple(replace(call, id=f"call{turn}") for call in message.tool_calls)
        content = message.content if keeps_text or not calls else ""
        return replace(message, content=content, reasoning=self._thought, tool_calls=calls)

    def _count(self, read: Sequence[int], said: Sequence[int]) -> None:
        before = len(self._sequences[-1]) if self._sequences else 0
        known = max((_shared(read, one) for one in self._sequences), default=0)
        self._unavoidable += max(len(read) - before, 0)
        self._computed += len(read) - known
        self._sequences.append([*read, *said])


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _next(reply: Message) -> tuple[Message, ...]:
    results = [
        Message(role="tool", content=f"{call.name}: done, in 12 lines.", tool_call_id=call.id)
        for call in reply.tool_calls
    ]
    return tuple(results) or (Message(role="user", content="Now look at the other one."),)


class _Script:
    """Stands in for an engine: it keeps what it is given to read, and writes what it is told to.

    Attributes:
        says: token ids of the next reply.
    """

    def __init__(self, subject: Subject) -> None:
        self._tokenizer = subject.tokenizer
        self.says: Sequence[int] = ()
        self.read: tuple[int, ...] = ()

    def submit(self, job: Job) -> _Script:
        self.read = job.prompt.ids
        return self

    def peek(self, job: Job) -> Restored:
        return Restored(0, known=job.known)

    def take(self, patience_s: float) -> list[Event]:  # noqa: ARG002 - the interface
        text = b"".join(map(self._tokenizer.token_bytes, self.says)).decode(errors="replace")
        end = min(self._tokenizer.end_tokens, default=0)
        return [Text(text, tuple(self.says)), Text("", (end,)), Finished("stop", Usage(1, 0, 1))]

    def cancel(self) -> None:
        """Nothing runs."""


def _service(subject: Subject, engine: _Script) -> Service:
    settings, tokenizer = Settings(), subject.tokenizer
    known = transcripts(settings, tokenizer)
    traits = ModelTraits(
        vocabulary=_WINDOW,
        family=subject.family,
        context_window=_WINDOW,
        default_max_tokens=None,
        sampling_defaults=(),
    )
    return Service(
        engine=engine,
        tokenizer=tokenizer,
        preparer=Preparer(tokenizer, subject.family, heal=known.heal),
        transcripts=known,
        traits=traits,
        reports=Reports(RequestMetrics(), Terminal(io.StringIO())),
    )
