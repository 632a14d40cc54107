"""Finds blocks of tool calls in the text of an answer. State machines without I/O."""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output
from start_llm.core.markers import first_marker, longest_beginning
from start_llm.output.rereading import RereadableText
from start_llm.output.spacing import TrailingSpace
from start_llm.output.tool_calls.base import (
    Arguments,
    CallPart,
    Ended,
    Format,
    Part,
    Plain,
    Reader,
    Started,
)
from start_llm.output.tool_calls.schema import Tools


class CallCounter:
    """Turns the parts of calls into events; the calls of a reply are counted through."""

    def __init__(self) -> None:
        self._index = -1
        self.completed = 0

    @property
    def is_open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._index >= self.completed

    def event(self, part: CallPart) -> Output:
        match part:
            case Started(name):
                self._index += 1
                return CallStarted(self._index, name)
            case Arguments(text):
                return CallArguments(self._index, text)
            case Ended():
                self.completed += 1
                return CallEnded(self._index)


class _Block:
    """What follows an opener. Every format that has it reads along; the first that is certain wins."""

    def __init__(self, opener: str, readers: list[Reader]) -> None:
        self._readers = readers
        self._is_certain = False
        self._opener = opener
        self._read = [opener]

    def feed(self, text: str) -> list[Part]:
        if not self._is_certain:
            self._read.append(text)
        for reader in list(self._readers):
            parts = reader.feed(text)
            if self._settled(reader, parts):
                return parts
        return []

    def close(self, complete: bool) -> list[Part]:
        for reader in list(self._readers):
            parts = reader.close(complete)
            if self._settled(reader, parts):
                return parts
        return []

    def _settled(self, reader: Reader, parts: list[Part]) -> bool:
        if reader.state == "failed":
            self._readers.remove(reader)
        if parts and not self._is_certain:
            if isinstance(parts[0], Plain):
                parts[0] = Plain(self._opener + parts[0].text)
            self._readers = [reader]
            self._is_certain = True
            self._read = []
        return bool(parts)

    @property
    def text(self) -> str:
        """Everything read, while it may still turn out to be no call."""
        return "".join(self._read)

    @property
    def is_none(self) -> bool:
        """No format takes it for calls."""
        return not self._readers

    @property
    def rest(self) -> str | None:
        """The text behind the block; None while it goes on."""
        done = [reader for reader in self._readers if reader.state == "done"]
        return done[0].rest if done else None


class CallFinder:
    """Separates an answer into text and calls.

    White space in front of a call is dropped: clients drop it too, and what they send back would differ.

    Args:
        formats: the likeliest first.
        tools: without tools nothing is a call.
        calls_come_first: nor is anything behind text.
    """

    def __init__(self, formats: Sequence[Format], tools: Tools, *, calls_come_first: bool = False) -> None:
        self._formats = tuple(formats) if tools else ()
        self._calls_come_first = calls_come_first
        self._tools = tools
        self._openers = tuple(dict.fromkeys(opener for one in self._formats for opener in one.openers))
        self._has_bare = any(one.bare for one in self._formats)
        self._counter = CallCounter()
        self._block: _Block | None = None
        self._text = RereadableText()
        self._held = ""
        self._space = TrailingSpace()
        self._behind_call = False
        self._was_cut = False
        self.was_cut_in_block = False
        """The reply was cut in an opener, or in front of the end that belongs to it."""
        self.is_silent = True
        """Nothing but white space has come so far."""

    @property
    def completed(self) -> int:
        """Calls that were read to their end."""
        return self._counter.completed

    @property
    def call_is_open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._counter.is_open

    @property
    def was_cut_in_call(self) -> bool:
        """Whether the reply was cut in a call, or in what might have become one."""
        return self._counter.is_open or self._was_cut

    def feed(self, text: str) -> list[Output]:
        events: list[Output] = []
        self._text.append(text)
        self._read(events)
        return events

    def feed_again(self, text: str) -> list[Output]:
        """Text that was taken for something else. Much may come at once, so attempts at calls are limited."""
        events: list[Output] = []
        self._text.append(text)
        self._text.give_back(self._text.everything_left())
        self._read(events)
        return events

    def close(self, complete: bool) -> list[Output]:
        """The reply is over; `complete` if the model ended it.

        A block that the model has ended too early is malformed, and a good call may stand in what it gives
        back. A block that was cut is most likely one call, and nothing in its arguments is another.
        """
        events: list[Output] = []
        self.was_cut_in_block = not complete and (self._block is not None or bool(self._held))
        while block := self._block:
            self._note(block.close(complete), events)
            self._leave(block, events)
            self._block = None
            if complete:
                self._read(events)
            else:
                rest = self._text.everything_left()
                self._was_cut = bool(rest.strip())
                self._say(rest, events)
        self._say(self._held, events)
        space, self._held = self._space.release(), ""
        return [*events, *([Content(space)] if space and not self._behind_call else [])]

    def _read(self, events: list[Output]) -> None:
        """Everything that there is to read."""
        while piece := self._text.next_piece():
            if self._block:
                self._read_block(self._block, piece, events)
            else:
                self._read_text(piece, events)

    def _read_text(self, piece: str, events: list[Output]) -> None:
        """Text up to the next opener."""
        buffer, self._held = self._held + piece, ""
        if self._has_bare and self.is_silent and (begun := buffer.lstrip()).startswith("{"):
            self._say(buffer[: len(buffer) - len(begun)], events)
            self._open("", begun)
            return
        is_behind_text = self._calls_come_first and not self._may_begin_with_call(buffer)
        if is_behind_text or self._text.is_used_up:
            self._say(buffer, events)
            return
        found = first_marker(buffer, self._openers)
        if found is None:
            keep = longest_beginning(buffer, self._openers)
            self._say(buffer[: len(buffer) - keep], events)
            self._held = buffer[len(buffer) - keep :]
            return
        start, opener = found
        self._say(buffer[:start], events)
        self._open(opener, buffer[start + len(opener) :])

    def _may_begin_with_call(self, buffer: str) -> bool:
        """Behind a call there may be another one."""
        begun = buffer.lstrip()
        is_opener = begun.startswith(self._openers) or any(one.startswith(begun) for one in self._openers)
        return self.completed > 0 or (self.is_silent and is_opener)

    def _open(self, opener: str, behind: str) -> None:
        self._text.begin_attempt()
        formats = [one for one in self._formats if (opener in one.openers if opener else one.bare)]
        self._block = _Block(opener, [one.reader(self._tools) for one in formats])
        self._text.give_back(behind)

    def _read_block(self, block: _Block, piece: str, events: list[Output]) -> None:
        self._note(block.feed(piece), events)
        self._leave(block, events)

    def _leave(self, block: _Block, events: list[Output]) -> None:
        """Give back what is behind the block, or what turned out to be none."""
        if block.is_none:
            # Its first character is text; the rest may hold an opener.
            text = block.text
            self._block = None
            self._say(text[0], events)
            self._text.give_back(text[1:])
        elif block.rest is not None:
            self._block = None
            self._text.give_back(block.rest)

    def _note(self, parts: list[Part], events: list[Output]) -> None:
        for part in parts:
            if isinstance(part, Plain):
                self._say(part.text, events)
                continue
            self._space.drop()
            self.is_silent = False
            self._behind_call = isinstance(part, Ended)
            events.append(self._counter.event(part))

    def _say(self, text: str, events: list[Output]) -> None:
        """Text of the answer; white space at its end waits for what follows."""
        said = self._space.pass_on(text)
        if self._behind_call:
            said = said.lstrip("\n")
        if said:
            self.is_silent = self._behind_call = False
            events.append(Content(said))
