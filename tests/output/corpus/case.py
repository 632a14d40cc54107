"""The contents of a case of the corpus, and the tools that are offered in all of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output, Reasoning
from start_llm.core.family import Family, ReasoningMarks
from start_llm.formats.reading.schema import Tools
from start_llm.output.splitter import make_splitter
from start_llm.output.stream import merge_adjacent

TAGS = ReasoningMarks("<think>", "</think>", cut="\n</think>\n\n")


def tool(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> dict[str, Any]:
    """A function tool as OpenAI's chat protocol has them."""
    parameters = {"type": "object", "properties": properties or {}} | schema
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TYPED: dict[str, Any] = {
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
    "nothing": {"type": "null"},
    "mixed": {"type": ["string", "integer"]},
    "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "listed": {"oneOf": [{"type": "array"}, {"type": "string"}]},
    "mode": {"enum": ["1", "2"]},
    "level": {"enum": [1, 2]},
    "fixed": {"const": "7"},
    "place": {"$ref": "#/$defs/Place"},
    "wrapped": {"allOf": [{"$ref": "#/$defs/Place"}, {"description": "a place"}]},
    "slashed": {"$ref": "#/$defs/a~1b"},
    "lost": {"$ref": "#/$defs/Nowhere"},
    "loop": {"$ref": "#/$defs/Loop"},
    "half": {"anyOf": [{"type": "string"}, {}]},
    "free": {},
    "open": True,
}
"""One argument for each thing that a schema can say about a type."""

TOOLS = Tools(
    [
        tool("read", {"path": {"type": "string"}, "limit": {"type": "integer"}}),
        tool("write", {"path": {"type": "string"}, "text": {"type": "string"}}),
        tool("list"),
        tool(
            "typed",
            TYPED,
            **{
                "$defs": {
                    "Place": {"type": "string"},
                    "a/b": {"type": "string"},
                    "Loop": {"$ref": "#/$defs/Loop"},
                }
            },
        ),
        tool("note", additionalProperties={"type": "string"}),
    ]
)
NO_TOOLS = Tools([])


@dataclass(frozen=True)
class Call:
    """A call that has to come out. `raw` where its very JSON matters."""

    name: str
    arguments: Any = field(default_factory=dict)
    raw: str | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A reply, and what it means.

    Attributes:
        open_call: name and unclosed arguments of a call that does not end.
    """

    name: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    open_call: tuple[str, str] | None = None
    family: Family = field(default_factory=lambda: Family(name="plain"))
    tools: Tools = TOOLS
    reasoning_is_open: bool = False
    thinking: bool = True
    complete: bool = True


@dataclass
class Outcome:
    """The parts of a reply, without their order."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments; the last one may be open."""
    ended: int = 0

    @property
    def open_call(self) -> tuple[str, str] | None:
        return self.calls[-1] if len(self.calls) > self.ended else None

    @property
    def closed_calls(self) -> list[tuple[str, str]]:
        return self.calls[: self.ended]


def split(case: Case, pieces: Iterable[str], *, complete: bool | None = None) -> list[Output]:
    """The events of the reply in these pieces, neighbours joined."""
    splitter = make_splitter(
        case.family, case.tools, reasoning_is_open=case.reasoning_is_open, thinking=case.thinking
    )
    events: list[Output] = []
    for piece in pieces:
        events += splitter.feed(piece)
    events += splitter.close(case.complete if complete is None else complete)
    outcome = outcome_of(events)
    assert splitter.counter.completed == outcome.ended
    assert splitter.counter.is_open == (outcome.open_call is not None)
    return list(merge_adjacent(events))


def outcome_of(events: Sequence[Output]) -> Outcome:
    """Also checks what holds for every reply: no empty event, calls one after the other."""
    outcome = Outcome()
    for event in events:
        match event:
            case Content(text):
                assert text
                outcome.content += text
            case Reasoning(text):
                assert text
                outcome.reasoning += text
            case CallStarted(index, name):
                assert index == len(outcome.calls) == outcome.ended
                outcome.calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(outcome.calls) - 1 == outcome.ended
                assert text
                name, before = outcome.calls[index]
                outcome.calls[index] = (name, before + text)
            case CallEnded(index):
                assert index == len(outcome.calls) - 1 == outcome.ended
                outcome.ended += 1
    return outcome


def leaves(value: object) -> Iterator[object]:
    """The texts, numbers and literals in the arguments of a call, however deep."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value
