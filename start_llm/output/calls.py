"""Finds blocks of tool calls in the text of an answer. State machines without I/O."""

from collections.abc import Sequence

import regex

from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output
from start_llm.core.markers import first_marker, longest_beginning
from start_llm.formats.reading.block import compiled
from start_llm.formats.reading.parts import CallPart, ParsedArguments, ParsedEnd, ParsedName, ParsedText, Part
from start_llm.output.blocks import CallBlock, CallFormats
from start_llm.output.rereading import RereadableText
from start_llm.output.spacing import TrailingSpace

_TICKS = regex.compile("`+")
_FENCE = 3
_QUOTES = ("`", '"', "'")


class QuoteWatch:
    """Follows the fences and the inline code of an answer in Markdown."""

    def __init__(self) -> None:
        self._ticks = 0
        self._in_fence = self._in_code = False
        self._last = ""

    @property
    def is_inside(self) -> bool:
        """True in a fence, in inline code, and directly after a quotation mark."""
        in_fence, in_code = self._after_ticks()
        return in_fence or in_code or self._last in _QUOTES

    def note(self, text: str) -> None:
        """Read the next text. A row of backticks may go on in the text after it."""
        place = 0
        for ticks in _TICKS.finditer(text):
            self._pass(text, place, ticks.start())
            self._ticks += len(ticks[0])
            place = ticks.end()
        self._pass(text, place, len(text))
        self._last = text[-1:] or self._last

    def _pass(self, text: str, start: int, end: int) -> None:
        """Read text without backticks. Inline code ends with its line."""
        if start < end:
            self._end_ticks()
            self._in_code = self._in_code and text.find("\n", start, end) < 0

    def _end_ticks(self) -> None:
        self._in_fence, self._in_code = self._after_ticks()
        self._ticks = 0

    def _after_ticks(self) -> tuple[bool, bool]:
        if self._ticks >= _FENCE:
            return not self._in_fence, False
        return self._in_fence, self._in_code ^ bool(self._ticks and not self._in_fence)


_REMAINS = r"\s*(?:,\s*(?:\"[^\"\n]{{0,64}}\"|\w{{1,64}})\s*(?=\]))?[}}\]\)`]{{0,4}}\s*(?:{})"
"""What is left of a call after its end: another item of its list, brackets, and a mark that ends it."""
_LEAST_MARKUP = 3
"""A cut mark of at least this many characters is markup; a shorter one may be text."""


class CallCounter:
    """Converts the parts of calls into events and numbers the calls of a reply from 0.

    Attributes:
        completed: number of calls that were read to their end.
    """

    def __init__(self) -> None:
        self._index = -1
        self.completed = 0

    @property
    def is_open(self) -> bool:
        """True if a call has begun and not ended."""
        return self._index >= self.completed

    def event(self, part: CallPart) -> Output:
        match part:
            case ParsedName(name):
                self._index += 1
                return CallStarted(self._index, name)
            case ParsedArguments(text):
                return CallArguments(self._index, text)
            case ParsedEnd():
                self.completed += 1
                return CallEnded(self._index)


class CallFinder:
    """Separates an answer into text and calls, up to the next mark.

    Drops white space before a call: clients drop it too, so the text that they send back would differ.

    Args:
        text: the source of the pieces; takes back text that has to be read again.
        marks: texts that are never part of an answer.
        calls_come_first: nothing after text is a call.

    Attributes:
        counter: of the calls so far.
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
        self.counter = CallCounter()
        self._block: CallBlock | None = None
        self._text = text
        self._held = ""
        self._remains = _remains(formats.closers) if formats.closers else None
        self._space = TrailingSpace()
        self._quotes = QuoteWatch()
        self._after_call = False
        # A list of calls was text, so the answer may be about calls.
        self._names_calls = False
        self._was_cut = False
        self.was_cut_in_block = False
        """The reply was cut in an opener or a mark, or after an opener and before the end of its block."""
        self.was_repaired = False
        """A call is not what the model wrote, character by character."""
        self.is_silent = True
        """Only white space has arrived so far."""

    @property
    def was_cut_in_call(self) -> bool:
        """True if the reply was cut inside a call, or inside text that might have become one."""
        return self.counter.is_open or self._was_cut

    def read(self, piece: str, events: list[Output]) -> str | None:
        """Read a piece. If it has a mark, return the mark and give back the text after it."""
        if self._block:
            self._read_block(self._block, piece, events)
            return None
        return self._read_text(piece, events)

    def end_block(self, complete: bool, events: list[Output]) -> bool:
        """End the reply; `complete` if the model ended it. Return True if there is text to be read again.

        A block that the model ended too early is malformed, and the text it gives back may contain a valid
        call. A block that was cut is most likely one call, so nothing in its arguments is treated as another.
        Its text is shown only if the reply has no whole call: beside one it would be markup without use.
        """
        block = self._block
        if block is None:
            return False
        outputs: list[Output] = []
        self.note(block.close(complete), outputs)
        self._leave(block, outputs)
        self._block = None
        if not complete:
            rest = self._text.everything_left()
            self._was_cut = bool(rest.strip())
            self.was_cut_in_block = True
            self._say(rest, outputs)
        events += outputs if complete or not self.counter.completed else self._without_cut_call(outputs)
        return complete

    def _without_cut_call(self, outputs: list[Output]) -> list[Output]:
        shown: list[Output] = [output for output in outputs if not isinstance(output, Content)]
        self._was_cut |= len(shown) < len(outputs)
        self._space.drop()
        return shown

    def close(self, complete: bool, events: list[Output]) -> None:
        """Emit the held text, unless it is markup. No block may be open and no text may be left to read."""
        held, self._held = self._held, ""
        is_cut_call = not complete and bool(held) and self._after_call
        self._was_cut |= is_cut_call
        self.was_cut_in_block |= is_cut_call
        self.was_cut_in_block |= not complete and self._may_be_markup(held)
        if not (is_cut_call or is_half_a_mark(held, self._marks)):
            self._say(held, events)
        space = self._space.release()
        if space and not self._after_call:
            events.append(Content(space))

    def _may_be_markup(self, held: str) -> bool:
        """Return True if the end of a reply that was cut may be the start of a call or a mark.

        A letter or two with which some format's markup begins, such as the `f` of `functools[`, are text.
        """
        return bool(held) and (self.is_silent or is_half_a_mark(held, (*self._marks, *self._formats.openers)))

    def _read_text(self, piece: str, events: list[Output]) -> str | None:
        """Read text up to the next opener or mark."""
        buffer, self._held = self._without_remains(self._held + piece), ""
        if self._is_remains(buffer):
            self._held = buffer
            return None
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
        match = first_marker(buffer, markers)
        if match is None:
            keep = longest_beginning(buffer, markers)
            self._say(buffer[: len(buffer) - keep], events)
            self._held = buffer[len(buffer) - keep :]
            return None
        start, marker = match
        self._say(buffer[:start], events)
        after = buffer[start + len(marker) :]
        if marker in self._marks:
            self._pass_mark(after)
            return marker
        self._open(marker, after)
        return None

    def _without_remains(self, buffer: str) -> str:
        """Drop marks that end a call once more, directly after one."""
        while self._after_call and self._remains and (match := self._remains.match(buffer)):
            self._space.drop()
            self.was_repaired = True
            buffer = buffer[match.end() :]
        return buffer

    def _is_remains(self, buffer: str) -> bool:
        """Return True if more text is needed to tell the remains of a call from an answer."""
        if not (self._after_call and self._remains and buffer.strip()):
            return False
        return self._remains.match(buffer, partial=True) is not None

    def _openers(self, buffer: str) -> tuple[str, ...]:
        """Return the openers that may begin a call here."""
        if self._text.is_used_up:
            return ()
        if self._calls_come_first:
            return self._formats.openers if self._may_begin_with_call(buffer) else ()
        return (*self._formats.openers, *(() if self._names_calls else self._formats.at_end))

    def _may_become_bare(self, begun: str) -> bool:
        """Return True if the next character is needed to tell a bare block from an opener or a mark."""
        bare, marks = self._formats.bare, (*self._formats.openers, *self._marks)
        longer = (*bare, *marks) if begun.startswith(bare) else bare
        return any(text.startswith(begun) and text != begun for text in longer)

    def _may_begin_with_call(self, buffer: str) -> bool:
        """Return True if the answer begins with an opener here, or if a call came before."""
        begun, openers = buffer.lstrip(), self._formats.openers
        is_opener = begun.startswith(openers) or any(opener.startswith(begun) for opener in openers)
        return self.counter.completed > 0 or (self.is_silent and is_opener)

    def _pass_mark(self, after: str) -> None:
        """Drop white space before the answer's first mark, and give back the text after the mark."""
        if self.is_silent:
            self._space.drop()
        self._text.give_back(after)

    def _open(self, opener: str, after: str) -> None:
        self._text.begin_attempt()
        self._block = self._formats.block(opener, after, may_be_quoted=self._quotes.is_inside)
        self._text.give_back(after)

    def _read_block(self, block: CallBlock, piece: str, events: list[Output]) -> None:
        self.note(block.feed(piece), events)
        self._leave(block, events)

    def _leave(self, block: CallBlock, events: list[Output]) -> None:
        """Give back the text after a finished block, or the text of a block that contains no calls."""
        if block.is_none:
            # The first character is text. The rest may contain an opener.
            text = block.text
            self._block = None
            self._names_calls |= text.startswith(self._formats.at_end)
            self._say(text[0], events)
            self._text.give_back(text[1:])
        elif block.rest is not None:
            self.was_repaired |= block.was_repaired
            self._block = None
            self._text.give_back(block.rest)

    def note(self, parts: Sequence[Part], events: list[Output]) -> None:
        """Emit events for the parts of calls."""
        for part in parts:
            if isinstance(part, ParsedText):
                self._say(part.text, events)
                continue
            self._space.drop()
            self.is_silent = False
            self._after_call = isinstance(part, ParsedEnd)
            events.append(self.counter.event(part))

    def _say(self, text: str, events: list[Output]) -> None:
        """Emit answer text. Hold back trailing white space if a call or a mark after it would drop it."""
        self._quotes.note(text)
        may_be_dropped = self._formats.openers or self.is_silent
        ready = self._space.pass_on(text) if may_be_dropped else self._space.release() + text
        if self._after_call:
            ready = ready.lstrip("\n")
        if ready:
            self.is_silent = self._after_call = False
            events.append(Content(ready))


def _remains(closers: Sequence[str]) -> regex.Pattern[str]:
    longest_first = sorted(closers, key=len, reverse=True)
    marks = "|".join(regex.escape(mark, literal_spaces=True) for mark in longest_first)
    return compiled(_REMAINS.format(marks))


def is_half_a_mark(text: str, marks: Sequence[str]) -> bool:
    """Return True if the end of a reply is the start of a mark and too long to be ordinary text."""
    return len(text) >= _LEAST_MARKUP and any(mark.startswith(text) for mark in marks)
