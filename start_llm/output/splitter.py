"""Separates a reply into thought, answer and calls. State machines without I/O: text in, events out.

How the text was cut into pieces never changes what comes out, only how early. Streamed replies and whole ones
go through the same machine.
"""

from __future__ import annotations

from typing import Literal, Protocol

from start_llm.core.events import Content, Output, Reasoning
from start_llm.core.family import Family
from start_llm.core.markers import longest_beginning
from start_llm.output.calls import CallFinder
from start_llm.output.channels import ChannelSplitter
from start_llm.output.spacing import TrailingSpace
from start_llm.output.tool_calls import ordered
from start_llm.output.tool_calls.schema import Tools

type _State = Literal["start", "thought", "answer"]


class Splitter(Protocol):
    """Reads one reply.

    Attributes:
        in_thought: whether the text read last belongs to a thought.
        calls: calls that were read to their end.
        call_is_open: a call has begun and not ended.
        was_cut_in_call: the reply was cut in a call, or in what might have become one.
        has_loose_end: the reply ended in markup that no event tells of.
    """

    @property
    def in_thought(self) -> bool: ...

    @property
    def calls(self) -> int: ...

    @property
    def call_is_open(self) -> bool: ...

    @property
    def was_cut_in_call(self) -> bool: ...

    @property
    def has_loose_end(self) -> bool: ...

    def feed(self, text: str) -> list[Output]: ...

    def close(self, complete: bool) -> list[Output]:
        """The reply is over. `complete` if the model ended it, not a limit or a stop string."""
        ...


def make_splitter(
    family: Family, tools: Tools, *, thought_is_open: bool, thinking: bool, calls_come_first: bool = False
) -> Splitter:
    """The machine for one reply.

    Args:
        thought_is_open: the prompt ends inside a thought.
        thinking: the model was asked to think, or nobody said that it should not.
        calls_come_first: an answer that does not begin with a call has none.
    """
    if family.channels:
        return ChannelSplitter(tools, thought_is_open=thought_is_open)
    finder = CallFinder(ordered(family.formats), tools, calls_come_first=calls_come_first)
    return TagSplitter(family, finder, thought_is_open=thought_is_open, thinking=thinking)


class PlainSplitter:
    """For text completions: everything is content."""

    in_thought = False
    calls = 0
    call_is_open = False
    was_cut_in_call = False
    has_loose_end = False

    def feed(self, text: str) -> list[Output]:
        return [Content(text)] if text else []

    def close(self, complete: bool) -> list[Output]:  # noqa: ARG002 - the interface
        return []


class TagSplitter:
    """A thought between two marks at the start of a reply, then the answer.

    A mark is one only where a thought can begin or end, so an answer may talk about marks. Newlines next to
    them are the template's. In a thought nothing is a call.

    A family with `orphan_close` may begin inside its thought although nothing opened one. Then a thought is
    assumed until its close comes; if it never does, what was taken for a thought was the answer, and is also
    given as that, unless the reply was cut.
    """

    def __init__(self, family: Family, finder: CallFinder, *, thought_is_open: bool, thinking: bool) -> None:
        self._opening = family.thought.opening if family.thought else ""
        self._closing = family.thought.closing if family.thought else ""
        self._finder = finder
        self._may_assume = family.orphan_close and thinking and not thought_is_open
        self._state: _State = "answer" if not family.thought else "thought" if thought_is_open else "start"
        self._held = ""
        self._space = TrailingSpace()
        self._newlines = TrailingSpace("\n")
        self._is_first = True
        self._assumed: list[str] | None = None
        self._behind_thought = False

    @property
    def in_thought(self) -> bool:
        return self._state == "thought"

    @property
    def calls(self) -> int:
        return self._finder.completed

    @property
    def call_is_open(self) -> bool:
        return self._finder.call_is_open

    @property
    def was_cut_in_call(self) -> bool:
        return self._finder.was_cut_in_call

    @property
    def has_loose_end(self) -> bool:
        return self._finder.was_cut_in_block

    def feed(self, text: str) -> list[Output]:
        events: list[Output] = []
        buffer, self._held = self._held + text, ""
        while buffer:
            match self._state:
                case "start":
                    buffer = self._read_start(buffer)
                case "thought":
                    buffer = self._read_thought(buffer, events)
                case "answer":
                    buffer = self._read_answer(buffer, events)
        return events

    def close(self, complete: bool) -> list[Output]:
        events: list[Output] = []
        held, self._held = self._held, ""
        if self._state == "thought":
            self._think(held, events)
            self._reason(self._newlines.release(), events)
            if complete and self._assumed:
                events += self._finder.feed_again("".join(self._assumed))
                self._state = "answer"
        else:
            events += self._finder.feed(self._space.release() + held)
        return [*events, *self._finder.close(complete)]

    def _read_start(self, buffer: str) -> str:
        """White space, then perhaps the opening mark."""
        begun = buffer.lstrip()
        if begun.startswith(self._opening):
            self._space.drop()
            self._state = "thought"
            return begun[len(self._opening) :]
        if self._opening.startswith(begun):
            self._space.pass_on(buffer[: len(buffer) - len(begun)])
            self._held = begun
            return ""
        if self._may_assume:
            self._assumed = []
            self._state = "thought"
        else:
            self._state = "answer"
        return self._space.release() + buffer

    def _read_thought(self, buffer: str, events: list[Output]) -> str:
        end = buffer.find(self._closing)
        if end >= 0:
            self._think(buffer[:end], events)
            self._newlines.drop()
            self._state, self._behind_thought, self._assumed = "answer", True, None
            return buffer[end + len(self._closing) :]
        keep = longest_beginning(buffer, (self._closing,))
        self._think(buffer[: len(buffer) - keep], events)
        self._held = buffer[len(buffer) - keep :]
        return ""

    def _think(self, text: str, events: list[Output]) -> None:
        """Text of the thought; newlines at its end wait for what follows."""
        self._reason(self._newlines.pass_on(text), events)

    def _reason(self, text: str, events: list[Output]) -> None:
        if self._is_first:
            text = text.lstrip("\n")
        if text:
            self._is_first = False
            events.append(Reasoning(text))
            if self._assumed is not None:
                self._assumed.append(text)

    def _read_answer(self, buffer: str, events: list[Output]) -> str:
        if self._behind_thought:
            buffer = buffer.lstrip("\n")
            self._behind_thought = not buffer
        events += self._finder.feed(buffer)
        return ""
