"""Reads open reasoning and finds the calls at its end. A state machine without I/O.

Calls inside closed reasoning are reasoning: the model may only have considered them. But a model may forget
to close its reasoning before it calls. So text is held back from the opener of a call on until it is decided.
It is reasoning as soon as no format parses it as a call of an offered tool, or text other than white space
follows it. It is calls if the model ends its reply there. Text already sent as reasoning stays reasoning.
"""

from collections.abc import Sequence

import regex

from start_llm.core.events import Output, Reasoning
from start_llm.core.family import ReasoningMarks
from start_llm.core.markers import first_marker, longest_beginning
from start_llm.formats.reading.parts import ParsedText, Part
from start_llm.output.blocks import CallBlock, CallFormats
from start_llm.output.rereading import RereadableText
from start_llm.output.spacing import TrailingSpace


class ReasoningReader:
    """Reads reasoning, starting after its opening mark.

    Args:
        text: the source of the pieces; takes back text that has to be read again.
        formats: notations of the calls that the reasoning may end with.
        answer_marks: marks that are dropped from reasoning too.
        is_after_mark: the reply has the opening mark, so its label may follow.
    """

    def __init__(
        self,
        marks: ReasoningMarks,
        text: RereadableText,
        formats: CallFormats,
        answer_marks: Sequence[str] = (),
        *,
        is_after_mark: bool = False,
    ) -> None:
        self._mark, self._closing = marks.mark, marks.closing
        self._label = marks.label
        self._whole_label = regex.compile(rf"{regex.escape(marks.label)}(?!\w)")
        self._label_is_due = is_after_mark and bool(marks.label)
        self._ends = (marks.closing, *(marks.ended_by if formats.openers else ()))
        self._dropped = (*answer_marks, *((marks.mark,) if marks.is_unmistakable else ()))
        self._text = text
        self._formats = formats
        self._held = ""
        self._newlines = TrailingSpace("\n")
        self._is_first = True
        self._is_closing = False
        # Calls that may end the reasoning: text before the open block, the block, its text, and all parts.
        self._waiting: list[str] = []
        self._block: CallBlock | None = None
        self._block_text: list[str] = []
        self._parts: list[Part] = []

    def read(self, piece: str, events: list[Output]) -> bool:
        """Read the start of a piece and give back the rest. Return True if the reasoning ends there."""
        buffer, self._held = self._without_openings(self._held + piece), ""
        markers = self._markers
        match = first_marker(buffer, markers, goes_on=not self._is_closing)
        if match is None:
            keep = 0 if self._is_closing else self._undecided(buffer, markers)
            self._held = buffer[len(buffer) - keep :]
            self._take(buffer[: len(buffer) - keep], events)
            return False
        start, marker = match
        if start:
            self._text.give_back(buffer[start:])
            self._take(buffer[:start], events)
            return False
        return self._read_marker(marker, buffer[len(marker) :], events)

    def close(self, complete: bool, events: list[Output]) -> Sequence[Part]:
        """End the reply. Return the calls at the end if the model ended it; all other text is reasoning."""
        self._is_closing = True
        self._give_back("")
        self._read_left(events)
        while complete and (block := self._block):
            self._parts += block.close(complete=True)
            self._leave(block, events)
            if self._block is block:
                break
            self._read_left(events)
        if complete and self._waiting and not self._block:
            return self._parts
        self._give_up_calls(events)
        self._reason(self._newlines.release(), events)
        return ()

    @property
    def _markers(self) -> tuple[str, ...]:
        """The markers recognized at this point."""
        openers = () if self._block or self._text.is_used_up else self._formats.openers
        return (*self._ends, *self._dropped, *openers)

    @property
    def _is_silent(self) -> bool:
        return self._is_first and not self._waiting and not self._block

    def _without_openings(self, text: str) -> str:
        """Remove the label of a mark, and repeated marks: models repeat that of their prompt or their own."""
        while True:
            text = self._without_label(text)
            begun = text.lstrip("\n") if self._is_silent else text
            if self._may_be_label(text) or not (self._is_silent and begun.startswith(self._mark)):
                return begun
            text, self._label_is_due = begun.removeprefix(self._mark), bool(self._label)

    def _without_label(self, text: str) -> str:
        if self._may_be_label(text):
            return "" if self._is_closing else text
        if self._label_is_due and self._whole_label.match(text):
            text = text.removeprefix(self._label)
        self._label_is_due = False
        return text

    def _may_be_label(self, text: str) -> bool:
        """Return True if more text is needed to tell the label of a mark from reasoning."""
        return self._label_is_due and self._label.startswith(text)

    def _undecided(self, buffer: str, markers: Sequence[str]) -> int:
        """Return the number of characters at the end that depend on the next piece."""
        may_be_opening = self._may_be_label(buffer) or (self._is_silent and self._mark.startswith(buffer))
        return len(buffer) if may_be_opening else longest_beginning(buffer, markers)

    def _read_marker(self, marker: str, after: str, events: list[Output]) -> bool:
        """Handle a marker and give back the text after it. Return True if it ends the reasoning."""
        if marker in self._ends:
            self._give_up_calls(events)
            self._newlines.drop()
            self._text.give_back(after if marker == self._closing else marker + after)
            return True
        if marker in self._dropped:
            if self._block:
                self._give_up_calls(events)
            self._label_is_due = marker == self._mark and bool(self._label)
        else:
            self._text.begin_attempt()
            self._block, self._block_text = self._formats.block(marker, after), [marker]
        self._text.give_back(after)
        return False

    def _take(self, text: str, events: list[Output]) -> None:
        """Read text that contains no markers."""
        if block := self._block:
            self._block_text.append(text)
            self._parts += block.feed(text)
            self._leave(block, events)
        elif self._waiting and (not text or text.isspace()):
            self._waiting.append(text)
        else:
            self._give_up_calls(events)
            self._think(text, events)

    def _leave(self, block: CallBlock, events: list[Output]) -> None:
        """Give back the text after a finished block, or the text of a block that contains no calls."""
        text = "".join(self._block_text) if block.is_none or block.rest is not None else ""
        if block.is_none:
            self._block, self._block_text = None, []
            self._give_up_calls(events)
            # The first character is reasoning. The rest may contain an opener.
            self._think(text[0], events)
            self._give_back(text[1:])
        elif block.rest is not None:
            self._block, self._block_text = None, []
            self._waiting.append(text[: len(text) - len(block.rest)])
            if block.was_repaired or any(isinstance(part, ParsedText) for part in self._parts):
                self._give_up_calls(events)
            self._give_back(block.rest)

    def _give_back(self, text: str) -> None:
        self._text.give_back(text + self._held)
        self._held = ""

    def _read_left(self, events: list[Output]) -> None:
        while piece := self._text.next_piece():
            self.read(piece, events)

    def _give_up_calls(self, events: list[Output]) -> None:
        """Emit the text of the supposed calls as reasoning."""
        text = "".join((*self._waiting, *self._block_text))
        self._block, self._waiting, self._block_text, self._parts = None, [], [], []
        self._think(text, events)

    def _think(self, text: str, events: list[Output]) -> None:
        """Emit reasoning text. Newlines at its end wait for what follows."""
        self._reason(self._newlines.pass_on(text), events)

    def _reason(self, text: str, events: list[Output]) -> None:
        if self._is_first:
            text = text.lstrip("\n")
        if text:
            self._is_first = False
            events.append(Reasoning(text))
