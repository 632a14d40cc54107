"""Finds blocks of tool calls in the text of an answer. State machines without I/O."""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output
from start_llm.core.markers import first_marker, longest_beginning
from start_llm.formats.reading.parts import Arguments, CallPart, Ended, Part, Plain, Started
from start_llm.output.blocks import CallBlock, CallFormats
from start_llm.output.rereading import RereadableText
from start_llm.output.spacing import TrailingSpace

_LEAST_MARKUP = 3
"""So many characters of a mark that is cut are markup; fewer may be text."""


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


class CallFinder:
    """Separates an answer into text and calls, up to the next mark.

    White space in front of a call is dropped: clients drop it too, and what they send back would differ.

    Args:
        text: where the pieces come from, and what is read again goes back to.
        marks: texts that are no part of an answer, wherever they stand in it.
        calls_come_first: nothing behind text is a call.
    """

    def __init__(
        self,
        formats: CallFormats,
        text: RereadableText,
        *,
        marks: Sequence[str] = (),
        calls_come_first: bool = False,
    ) -> None:
        self._formats = formats
        self._marks = tuple(marks)
        self._calls_come_first = calls_come_first
        self._counter = CallCounter()
        self._block: CallBlock | None = None
        self._text = text
        self._held = ""
        self._space = TrailingSpace()
        self._behind_call = False
        self._was_cut = False
        self.was_cut_in_block = False
        """The reply was cut in an opener or a mark, or in front of the end that belongs to an opener."""
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

    def read(self, piece: str, events: list[Output]) -> str | None:
        """Read a piece, or what stands in front of a mark, which is told; what is behind it is given back."""
        if self._block:
            self._read_block(self._block, piece, events)
            return None
        return self._read_text(piece, events)

    def end_block(self, complete: bool, events: list[Output]) -> bool:
        """The reply is over; `complete` if the model ended it. True if there is text to be read again.

        A block that the model has ended too early is malformed, and a good call may stand in what it gives
        back. A block that was cut is most likely one call, and nothing in its arguments is another.
        """
        block = self._block
        if block is None:
            return False
        self.note(block.close(complete), events)
        self._leave(block, events)
        self._block = None
        if not complete:
            rest = self._text.everything_left()
            self._was_cut = bool(rest.strip())
            self.was_cut_in_block = True
            self._say(rest, events)
        return complete

    def close(self, complete: bool, events: list[Output]) -> None:
        """No block is open, and nothing is left to be read: what is held goes out, unless it is markup."""
        held, self._held = self._held, ""
        self.was_cut_in_block |= bool(held) and not complete
        if not is_half_a_mark(held, self._marks):
            self._say(held, events)
        space = self._space.release()
        if space and not self._behind_call:
            events.append(Content(space))

    def _read_text(self, piece: str, events: list[Output]) -> str | None:
        """Text up to the next opener or mark."""
        buffer, self._held = self._held + piece, ""
        bare = self._formats.bare
        if self.is_silent and bare and (begun := buffer.lstrip()):
            if self._may_become_bare(begun):
                self._held = buffer
                return None
            if begun.startswith(bare) and not begun.startswith(self._formats.openers):
                self._say(buffer[: len(buffer) - len(begun)], events)
                self._open("", begun)
                return None
        markers = (*self._openers(buffer), *self._marks)
        found = first_marker(buffer, markers)
        if found is None:
            keep = longest_beginning(buffer, markers)
            self._say(buffer[: len(buffer) - keep], events)
            self._held = buffer[len(buffer) - keep :]
            return None
        start, marker = found
        self._say(buffer[:start], events)
        behind = buffer[start + len(marker) :]
        if marker in self._marks:
            self._pass_mark(behind)
            return marker
        self._open(marker, behind)
        return None

    def _openers(self, buffer: str) -> tuple[str, ...]:
        """What may begin a call here."""
        is_behind_text = self._calls_come_first and not self._may_begin_with_call(buffer)
        return () if is_behind_text or self._text.is_used_up else self._formats.openers

    def _may_become_bare(self, begun: str) -> bool:
        """It depends on the next character whether this begins a bare block, or an opener in its place."""
        bare, marks = self._formats.bare, (*self._formats.openers, *self._marks)
        longer = (*bare, *marks) if begun.startswith(bare) else bare
        return any(text.startswith(begun) and text != begun for text in longer)

    def _may_begin_with_call(self, buffer: str) -> bool:
        """Behind a call there may be another one."""
        begun, openers = buffer.lstrip(), self._formats.openers
        is_opener = begun.startswith(openers) or any(one.startswith(begun) for one in openers)
        return self.completed > 0 or (self.is_silent and is_opener)

    def _pass_mark(self, behind: str) -> None:
        """White space in front of the answer's first mark is no part of it either."""
        if self.is_silent:
            self._space.drop()
        self._text.give_back(behind)

    def _open(self, opener: str, behind: str) -> None:
        self._text.begin_attempt()
        self._block = self._formats.block(opener, behind)
        self._text.give_back(behind)

    def _read_block(self, block: CallBlock, piece: str, events: list[Output]) -> None:
        self.note(block.feed(piece), events)
        self._leave(block, events)

    def _leave(self, block: CallBlock, events: list[Output]) -> None:
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

    def note(self, parts: Sequence[Part], events: list[Output]) -> None:
        """Tell the parts of calls."""
        for part in parts:
            if isinstance(part, Plain):
                self._say(part.text, events)
                continue
            self._space.drop()
            self.is_silent = False
            self._behind_call = isinstance(part, Ended)
            events.append(self._counter.event(part))

    def _say(self, text: str, events: list[Output]) -> None:
        """Text of the answer; white space at its end waits, if a call or a mark behind it would drop it."""
        may_be_dropped = self._formats.openers or self.is_silent
        said = self._space.pass_on(text) if may_be_dropped else self._space.release() + text
        if self._behind_call:
            said = said.lstrip("\n")
        if said:
            self.is_silent = self._behind_call = False
            events.append(Content(said))


def is_half_a_mark(text: str, marks: Sequence[str]) -> bool:
    """Whether a text at the end of a reply is the beginning of a mark, and nothing that one might write."""
    return len(text) >= _LEAST_MARKUP and any(mark.startswith(text) for mark in marks)
