"""Replies made of messages with headers (Harmony, gpt-oss). A state machine without I/O.

    <|channel|>analysis<|message|>thought<|end|>
    <|start|>assistant<|channel|>final<|message|>answer
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{"key": "value"}<|call|>

Calls are read here because they are messages. Ours: mlx_lm has no parser for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import regex

from start_llm.core.events import Content, Output, Reasoning
from start_llm.core.markers import first_marker, longest_beginning
from start_llm.formats.reading.json_calls import arguments_of
from start_llm.formats.reading.parts import Arguments, Ended, Started
from start_llm.formats.reading.schema import Tools
from start_llm.output.calls import CallCounter
from start_llm.output.spacing import TrailingSpace

_TO = r"(?:\s{0,16}to=(?P<to>[^\s<]{1,256}))?"
_WORDS = (
    r"(?:\s{0,16}<\|start\|>(?:\s{0,16}\w{1,32})?)?"
    rf"{_TO}(?:\s{{0,16}}<\|channel\|>\s{{0,16}}(?P<channel>\w{{1,32}}))?{_TO}"
    r"(?:\s{0,16}<\|constrain\|>)?(?:\s{0,16}\w{1,32})?\s{0,16}"
)
_HEADER = regex.compile(rf"{_WORDS}<\|message\|>")
_INTERRUPTED = regex.compile(
    rf"(?=\s{{0,16}}(?:<\|(?:start|channel)\|>|to=))(?>{_WORDS})(?=<\|(?:start|channel)\|>)"
)
"""A header in which another one begins."""
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = "to="
_BEGINNINGS = ("<|start|>", "<|channel|>")
_BEGINNING = regex.compile(r"\s{0,16}<\|(?:start|channel)\|>")

_PIECE = 1_024
"""Characters that are read at once: what is left behind each message is copied."""

type _Kind = Literal["header", "thought", "answer", "call"]


@dataclass(slots=True)
class _Message:
    """The message that is being read: what its text is, and what has been held back of it."""

    kind: _Kind
    name: str = ""
    header: str = ""
    body: list[str] = field(default_factory=list[str])


class ChannelSplitter:
    """Separates the messages of one reply by their channels and recipients."""

    def __init__(self, tools: Tools, *, thought_is_open: bool = False) -> None:
        self._tools = tools
        self._counter = CallCounter()
        self._message = _Message("thought" if thought_is_open else "header")
        self._held = ""
        self._space = TrailingSpace()
        self._has_said = False
        self._was_cut = False
        self.has_loose_end = False

    @property
    def in_thought(self) -> bool:
        return self._message.kind == "thought"

    @property
    def calls(self) -> int:
        return self._counter.completed

    @property
    def call_is_open(self) -> bool:
        return self._counter.is_open

    @property
    def was_cut_in_call(self) -> bool:
        return self._was_cut

    def feed(self, text: str) -> list[Output]:
        events: list[Output] = []
        for start in range(0, len(text), _PIECE):
            self._read(text[start : start + _PIECE], events)
        return events

    def _read(self, piece: str, events: list[Output]) -> None:
        buffer, self._held = self._held + piece, ""
        while buffer:
            if self._message.kind == "header":
                buffer = self._read_header(buffer, events)
            else:
                buffer = self._read_body(buffer, events)

    def close(self, complete: bool) -> list[Output]:
        """A whole object is a call, cut or not."""
        events: list[Output] = []
        held, self._held = self._held, ""
        if self._message.kind != "header":
            self._take(held, events)
            before = self.calls
            self._end_message("", events, is_whole=complete)
            self._was_cut = not complete and self._message.kind == "call" and self.calls == before
        elif held and not any(mark in held for mark in _BEGINNINGS):
            # Half a header is markup; else it is what the model had to say, or a recipient that was cut.
            self._say(held, events)
            self.has_loose_end = not complete and _RECIPIENT.startswith(held.strip()[: len(_RECIPIENT)])
        else:
            self.has_loose_end = True
        space = self._space.release()
        return [*events, *(_content(space) if self._has_said else [])]

    def _read_header(self, buffer: str, events: list[Output]) -> str:
        match = _HEADER.match(buffer, partial=True)
        interrupted = None if match else _INTERRUPTED.match(buffer, partial=True)
        if (match and match.partial) or (interrupted and interrupted.partial):
            self._held = buffer
            return ""
        if match:
            self._message = self._message_of(match)
            return buffer[match.end() :]
        if interrupted and interrupted.end():
            return buffer[interrupted.end() :]
        self._message = _Message("answer")
        return self._read_no_header(buffer, events)

    def _read_no_header(self, buffer: str, events: list[Output]) -> str:
        """A marker that begins no header is text of the answer, and would end that if it were read again."""
        marker = _BEGINNING.match(buffer)
        end = marker.end() if marker else 0
        self._say(buffer[:end], events)
        return buffer[end:]

    def _message_of(self, header: regex.Match[str]) -> _Message:
        recipient = header["to"]
        if recipient is not None:
            return _Message("call", recipient.removeprefix("functions."), header[0])
        return _Message("thought" if header["channel"] == "analysis" else "answer")

    def _read_body(self, buffer: str, events: list[Output]) -> str:
        found = first_marker(buffer, _ENDS)
        if found is None:
            keep = longest_beginning(buffer, _ENDS)
            self._take(buffer[: len(buffer) - keep], events)
            self._held = buffer[len(buffer) - keep :]
            return ""
        start, marker = found
        self._take(buffer[:start], events)
        own_end = "" if marker in _BEGINNINGS else marker
        self._end_message(own_end, events)
        self._message = _Message("header")
        return buffer[start + len(own_end) :]

    def _take(self, text: str, events: list[Output]) -> None:
        match self._message.kind:
            case "thought":
                events += [Reasoning(text)] if text else []
            case "call":
                self._message.body.append(text)
            case _:
                self._say(text, events)

    def _say(self, text: str, events: list[Output]) -> None:
        """White space at the end of an answer waits for what follows: in front of a call it is dropped."""
        said = self._space.pass_on(text)
        self._has_said = self._has_said or bool(said)
        events += _content(said)

    def _end_message(self, end: str, events: list[Output], *, is_whole: bool = True) -> None:
        message = self._message
        if message.kind != "call":
            return
        body = "".join(message.body)
        arguments = _arguments(body, is_whole=is_whole)
        if arguments is None or message.name not in self._tools:
            self._say(message.header + body + end, events)
            return
        self._space.drop()
        parts = (Started(message.name), Arguments(arguments), Ended())
        events += [self._counter.event(part) for part in parts]


def _arguments(body: str, *, is_whole: bool) -> str | None:
    """None if they are no object. An empty message has none, unless it was cut."""
    if is_whole and not body.strip():
        return "{}"
    try:
        return arguments_of(body)
    except (ValueError, RecursionError):
        return None


def _content(text: str) -> list[Output]:
    return [Content(text)] if text else []
