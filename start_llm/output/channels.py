"""Splits replies that consist of messages with headers (Harmony, gpt-oss). A state machine without I/O.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>final<|message|>answer
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{"key": "value"}<|call|>

Calls are parsed here because each call is a message. Own parser, because mlx_lm has none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import regex

from start_llm.core.events import Content, Output, Reasoning
from start_llm.core.markers import first_marker, longest_beginning
from start_llm.formats.reading.almost_json import almost_json
from start_llm.formats.reading.json_calls import arguments_of
from start_llm.formats.reading.json_text import with_whole_characters
from start_llm.formats.reading.parts import ParsedArguments, ParsedEnd, ParsedName
from start_llm.formats.reading.schema import Tools
from start_llm.output.calls import CallCounter
from start_llm.output.spacing import TrailingSpace

_TO = r"(?:\s{0,16}to=(?P<to>[^\s<]{1,256}))?"
_WORDS = (
    r"(?:(?:\s{0,16}<\|start\|>){1,4}(?:\s{0,16}\w{1,32})?)?"
    rf"{_TO}(?:(?:\s{{0,16}}<\|channel\|>){{1,4}}\s{{0,16}}(?P<channel>\w{{1,32}}))?{_TO}"
    r"(?:\s{0,16}<\|constrain\|>){0,4}(?:\s{0,16}\w{1,32})?\s{0,16}"
)
_HEADER = regex.compile(rf"{_WORDS}<\|message\|>")
_UNFINISHED = regex.compile(rf"{_WORDS}(?=\{{)")
"""A header without its last mark, before the arguments of a call."""
_INTERRUPTED = regex.compile(
    rf"(?=\s{{0,16}}(?:<\|(?:start|channel)\|>|to=))(?>{_WORDS})(?=<\|(?:start|channel)\|>)"
)
"""A header inside which another header begins."""
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_INSIDE = ("<|message|>", "<|constrain|>")
"""Control tokens inside a message; they are never text."""
_CONTROL = regex.compile("|".join(map(regex.escape, (*_ENDS, *_INSIDE))))
_RECIPIENT = "to="
_NO_TOOLS = ("assistant", "user", "all")
"""Recipients whose messages are text."""
_BEGINNINGS = ("<|start|>", "<|channel|>")
_BEGINNING = regex.compile(r"\s{0,16}<\|(?:start|channel)\|>")

_PIECE = 1_024
"""Characters read at once. The text after each message is copied, so small pieces keep that cheap."""

type _Kind = Literal["header", "reasoning", "answer", "call"]


@dataclass(slots=True)
class _Message:
    """The message being read: its kind and the text held back from it."""

    kind: _Kind
    name: str = ""
    body: list[str] = field(default_factory=list[str])


class ChannelSplitter:
    """Splits the messages of one reply by channel and recipient."""

    def __init__(self, tools: Tools, *, reasoning_is_open: bool = False) -> None:
        self._tools = tools
        self.counter = CallCounter()
        self._message = _Message("reasoning" if reasoning_is_open else "header")
        self._held = ""
        self._space = TrailingSpace()
        self._has_content = False
        self.was_cut_in_call = False
        self._recipient: str | None = None
        self.has_loose_end = False
        self.was_repaired = False

    @property
    def in_reasoning(self) -> bool:
        return self._message.kind == "reasoning"

    def feed(self, text: str) -> list[Output]:
        events: list[Output] = []
        for start in range(0, len(text), _PIECE):
            self._read(text[start : start + _PIECE], events)
        return events

    def _read(self, piece: str, events: list[Output]) -> None:
        buffer, self._held = self._held + piece, ""
        while buffer:
            if self._message.kind == "header":
                buffer = self._read_header(buffer)
            else:
                buffer = self._read_body(buffer, events)

    def close(self, complete: bool) -> list[Output]:
        """End the reply. A complete JSON object is a call, even if the reply was cut."""
        events: list[Output] = []
        held, self._held = self._held, ""
        if self._message.kind != "header":
            self._take(held, events)
            before = self.counter.completed
            self._end_message(events, is_whole=complete)
            is_call = self._message.kind == "call" and self.counter.completed == before
            self.was_cut_in_call = not complete and is_call
        elif held and not (
            any(mark in held for mark in _BEGINNINGS) or self._is_half_a_header(held, complete)
        ):
            # Half a header is markup. Anything else is text of the answer, or a recipient that was cut.
            self._say(_CONTROL.sub("", held), events)
            self.has_loose_end = not complete and _RECIPIENT.startswith(held.strip()[: len(_RECIPIENT)])
        else:
            self.has_loose_end = True
        space = self._space.release()
        return [*events, *(_content(space) if self._has_content else [])]

    def _is_half_a_header(self, held: str, complete: bool) -> bool:
        """Return True if a reply that was cut behind a call may end in the start of another."""
        return bool(not complete and self.counter.completed) and any(
            mark.startswith(held.strip()) for mark in _BEGINNINGS
        )

    def _read_header(self, buffer: str) -> str:
        match = _HEADER.match(buffer, partial=True)
        interrupted = None if match else _INTERRUPTED.match(buffer, partial=True)
        if (match and match.partial) or (interrupted and interrupted.partial):
            self._held = buffer
            return ""
        if match:
            self._message = self._message_of(match)
            return buffer[match.end() :]
        if interrupted and interrupted.end():
            # A recipient before a second channel belongs to the message; before a new message it is lost.
            is_same = buffer.startswith("<|channel|>", interrupted.end())
            self._recipient = (interrupted["to"] or self._recipient) if is_same else None
            return buffer[interrupted.end() :]
        return self._read_malformed_header(buffer)

    def _read_malformed_header(self, buffer: str) -> str:
        """Drop a marker that begins no valid header. Read again, it would end the answer."""
        unfinished = _UNFINISHED.match(buffer)
        message = self._message_of(unfinished) if unfinished else _Message("answer")
        if unfinished and message.kind == "call":
            self.was_repaired = True
            self._message = message
            return buffer[unfinished.end() :]
        self._message = _Message("answer")
        marker = _BEGINNING.match(buffer)
        self.was_repaired |= marker is not None
        return buffer[marker.end() :] if marker else buffer

    def _message_of(self, header: regex.Match[str]) -> _Message:
        recipient, self._recipient = header["to"] or self._recipient, None
        if recipient is not None and recipient not in _NO_TOOLS and header["channel"] != "final":
            return _Message("call", recipient)
        return _Message("reasoning" if header["channel"] == "analysis" else "answer")

    def _read_body(self, buffer: str, events: list[Output]) -> str:
        match = first_marker(buffer, (*_ENDS, *_INSIDE))
        if match is None:
            keep = longest_beginning(buffer, (*_ENDS, *_INSIDE))
            self._take(buffer[: len(buffer) - keep], events)
            self._held = buffer[len(buffer) - keep :]
            return ""
        start, marker = match
        self._take(buffer[:start], events)
        if marker in _INSIDE:
            self.was_repaired = True
            return buffer[start + len(marker) :]
        own_end = "" if marker in _BEGINNINGS else marker
        self._end_message(events)
        self._message = _Message("header")
        return buffer[start + len(own_end) :]

    def _take(self, text: str, events: list[Output]) -> None:
        match self._message.kind:
            case "reasoning":
                events += [Reasoning(text)] if text else []
            case "call":
                self._message.body.append(text)
            case _:
                self._say(text, events)

    def _say(self, text: str, events: list[Output]) -> None:
        """Emit answer text. White space at its end waits, because it is dropped before a call."""
        ready = self._space.pass_on(text)
        self._has_content = self._has_content or bool(ready)
        events += _content(ready)

    def _end_message(self, events: list[Output], *, is_whole: bool = True) -> None:
        """End a message. A call with other arguments is text, without the control tokens around it."""
        message = self._message
        if message.kind != "call":
            return
        body = "".join(message.body)
        arguments = _arguments(body if body.strip() or not is_whole else "{}")
        if arguments is None and is_whole:
            arguments = _arguments(body, almost_json)
            self.was_repaired |= arguments is not None
        name = self._tools.taking_any.meant(message.name.removeprefix("functions."))
        if arguments is None or name is None:
            self._say(body if is_whole or not self.counter.completed else "", events)
            return
        whole = with_whole_characters(arguments)
        self.was_repaired |= whole != arguments or name != message.name.removeprefix("functions.")
        self._space.drop()
        parts = (ParsedName(name), ParsedArguments(whole), ParsedEnd())
        events += [self.counter.event(part) for part in parts]


def _arguments(body: str, mended: Callable[[str], str] = str) -> str | None:
    """Return the arguments as JSON text, or None if they are not an object."""
    try:
        return arguments_of(mended(body))
    except (ValueError, RecursionError):
        return None


def _content(text: str) -> list[Output]:
    return [Content(text)] if text else []
