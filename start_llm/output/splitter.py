"""Splits a reply into reasoning, answer and calls. State machines without I/O: text in, events out.

How the text is cut into pieces affects only how early events come, never their content. Streamed and whole
replies use the same machine.
"""

from collections.abc import Sequence

from start_llm.core.events import Content, Output, Reasoning
from start_llm.core.family import Family, ReasoningMarks
from start_llm.formats.reading.schema import Tools
from start_llm.formats.registry import all_notations
from start_llm.output.answer_marks import AnswerUnwrapper
from start_llm.output.blocks import CallFormats
from start_llm.output.calls import CallCounter, CallFinder, is_half_a_mark
from start_llm.output.channels import ChannelSplitter
from start_llm.output.reasoning import ReasoningReader
from start_llm.output.rereading import RereadableText
from start_llm.output.spacing import TrailingSpace

type Splitter = PlainSplitter | TagSplitter | ChannelSplitter
"""Splits one reply.

Attributes:
    in_reasoning: the text read last belongs to reasoning.
    counter: counts the calls that were read.
    was_cut_in_call: the reply was cut inside a call, or inside text that might have become one.
    has_loose_end: the reply ended in markup that no event represents, or without the mark that an answer
        ends with.
    was_repaired: a call is not what the model wrote, character by character.
"""


def make_splitter(
    family: Family, tools: Tools, *, reasoning_is_open: bool, thinking: bool, calls_come_first: bool = False
) -> Splitter:
    """Return a splitter for one reply.

    Args:
        reasoning_is_open: the prompt ends inside reasoning.
        thinking: thinking was requested, or nothing turned it off.
        calls_come_first: an answer that does not begin with a call has none.
    """
    if family.channels:
        return ChannelSplitter(tools, reasoning_is_open=reasoning_is_open)
    return TagSplitter(
        family,
        tools,
        reasoning_is_open=reasoning_is_open,
        thinking=thinking,
        calls_come_first=calls_come_first,
    )


class PlainSplitter:
    """Splitter for text completions: everything is content."""

    in_reasoning = False
    was_cut_in_call = False
    has_loose_end = False
    was_repaired = False

    def __init__(self) -> None:
        self.counter = CallCounter()

    def feed(self, text: str) -> list[Output]:
        return [Content(text)] if text else []

    def close(self, complete: bool) -> list[Output]:  # noqa: ARG002 - the interface
        return []


class TagSplitter:
    """Splits replies that put reasoning between two marks, followed by the answer.

    Models also write about these marks, so an ordinary mark counts only before the answer has begun; later it
    is answer text. Unmistakable marks (`ReasoningMarks`) also count inside an answer: an opening mark begins
    more reasoning, and a closing mark without an opening one is dropped. The marks around an answer are
    dropped too: `answer_marks` wherever they stand, others only at its start and its end. Newlines next to
    reasoning belong to the template.

    A family with `orphan_close` may begin inside its reasoning although nothing opened it. Then the text is
    assumed to be reasoning until the closing mark. If the mark never comes, the text was the answer, and is
    emitted again as the answer, unless the reply was cut. A text that begins with a call is the answer.

    Args:
        calls_come_first: an answer that does not begin with a call has none. Such a reply has an enforced
            constraint, so marks can occur only around its answer, not inside it.
    """

    def __init__(
        self,
        family: Family,
        tools: Tools,
        *,
        reasoning_is_open: bool,
        thinking: bool,
        calls_come_first: bool = False,
    ) -> None:
        self._marks = family.reasoning
        self._answer_marks = family.answer_marks
        self._formats = CallFormats(all_notations(family.formats), tools, family.formats)
        self._no_calls = CallFormats((), tools)
        self._text = RereadableText()
        in_answer = () if calls_come_first else (*_unmistakable(family.reasoning), *family.answer_marks)
        self._finder = CallFinder(
            self._formats, self._text, marks=in_answer, calls_come_first=calls_come_first
        )
        self.counter = self._finder.counter
        may_be_quoted = calls_come_first or not family.answer_marks
        self._around = AnswerUnwrapper(family.around_answer if may_be_quoted else ())
        self._missing_mark = "" if calls_come_first else family.reply_end
        self._mark_after = {
            before: family.reply_end or after for before, after in family.around_answer if not may_be_quoted
        }
        self._may_assume = family.orphan_close and thinking and not reasoning_is_open
        self._reasoning: ReasoningReader | None = None
        self._may_begin_reasoning = family.reasoning is not None
        self._held = ""
        self._space = TrailingSpace()
        self._assumed: list[str] | None = None
        self._after_reasoning = False
        self._was_cut_in_mark = self._was_cut_in_answer = False
        if reasoning_is_open and family.reasoning:
            self._reasoning = self._opened(family.reasoning, is_after_mark=False)

    @property
    def in_reasoning(self) -> bool:
        return self._reasoning is not None

    @property
    def was_cut_in_call(self) -> bool:
        return self._finder.was_cut_in_call

    @property
    def has_loose_end(self) -> bool:
        was_cut_in_mark = self._finder.was_cut_in_block or self._was_cut_in_mark
        return was_cut_in_mark or self._was_cut_in_answer or self._around.was_cut

    @property
    def was_repaired(self) -> bool:
        return self._finder.was_repaired

    def feed(self, text: str) -> list[Output]:
        events: list[Output] = []
        self._text.append(text)
        self._read(events)
        return self._around.without(events)

    def close(self, complete: bool) -> list[Output]:
        """End the reply. `complete` if the model ended it, not a limit or a stop string."""
        events: list[Output] = []
        while self._end_part(complete, events):
            self._read(events)
        self._finder.close(complete, events)
        self._was_cut_in_answer = bool(self._missing_mark) and not complete
        return [*self._around.without(events), *self._around.close(complete)]

    def _read(self, events: list[Output]) -> None:
        """Read all available text."""
        while piece := self._text.next_piece():
            if self._reasoning:
                self._read_reasoning(self._reasoning, piece, events)
            elif self._may_begin_reasoning and self._marks:
                self._read_start(self._marks, piece, events)
            else:
                self._read_answer(piece, events)

    def _opened(self, marks: ReasoningMarks, *, is_after_mark: bool = True) -> ReasoningReader:
        return ReasoningReader(
            marks, self._text, self._formats, self._answer_marks, is_after_mark=is_after_mark
        )

    def _read_start(self, marks: ReasoningMarks, piece: str, events: list[Output]) -> None:
        """Read white space, then perhaps a mark of reasoning."""
        buffer, self._held = self._held + piece, ""
        begun = buffer.lstrip()
        self._space.pass_on(buffer[: len(buffer) - len(begun)])
        if begun.startswith(marks.mark):
            self._space.drop()
            self._reasoning = self._opened(marks)
            self._text.give_back(begun.removeprefix(marks.mark))
        elif begun.startswith(marks.closing):
            self._space.drop()
            self._end_reasoning()
            self._text.give_back(begun.removeprefix(marks.closing))
        elif begun and self._may_become_mark(begun, marks):
            self._held = begun
        elif begun and self._may_assume and not begun.startswith(self._formats.openers):
            self._begin_assumed(marks, begun, events)
        elif begun:
            self._begin_answer(events)
            self._text.give_back(begun)

    def _begin_assumed(self, marks: ReasoningMarks, begun: str, events: list[Output]) -> None:
        self._assumed = []
        self._reasoning = ReasoningReader(marks, self._text, self._no_calls)
        self._read_reasoning(self._reasoning, self._space.release() + begun, events)

    def _may_become_mark(self, begun: str, marks: ReasoningMarks) -> bool:
        """Return True if the next character is needed to tell a mark, or a call from assumed reasoning."""
        calls = self._formats.openers if self._may_assume else ()
        return any(mark.startswith(begun) and mark != begun for mark in (marks.mark, marks.closing, *calls))

    def _begin_answer(self, events: list[Output]) -> None:
        """Begin the answer, without the newlines between reasoning and answer."""
        space = self._space.release()
        self._finder.read(space.lstrip("\n") if self._after_reasoning else space, events)
        self._may_begin_reasoning = False

    def _read_answer(self, piece: str, events: list[Output]) -> None:
        mark = self._finder.read(piece, events)
        if self._marks and mark == self._marks.mark:
            self._reasoning = self._opened(self._marks)
        elif mark in self._mark_after:
            self._missing_mark = self._mark_after[mark]
        elif mark == self._missing_mark:
            self._missing_mark = ""

    def _read_reasoning(self, reasoning: ReasoningReader, piece: str, events: list[Output]) -> None:
        before = len(events)
        is_over = reasoning.read(piece, events)
        self._assume(events[before:])
        if is_over:
            self._end_reasoning()

    def _assume(self, events: Sequence[Output]) -> None:
        """Record assumed reasoning, which may turn out to be the answer."""
        if self._assumed is not None:
            self._assumed += [event.text for event in events if isinstance(event, Reasoning)]

    def _end_reasoning(self) -> None:
        """Leave reasoning. More reasoning may follow directly."""
        self._reasoning, self._assumed, self._may_assume = None, None, False
        self._may_begin_reasoning = self._after_reasoning = True

    def _end_part(self, complete: bool, events: list[Output]) -> bool:
        """Close the last part of the reply. Return True if there is text to be read again."""
        if self._may_begin_reasoning and self._marks and not self._reasoning:
            self._close_start(self._marks, complete, events)
        if self._reasoning:
            return self._close_reasoning(self._reasoning, complete, events)
        return self._finder.end_block(complete, events)

    def _close_reasoning(self, reasoning: ReasoningReader, complete: bool, events: list[Output]) -> bool:
        before = len(events)
        calls = reasoning.close(complete, events)
        self._assume(events[before:])
        if calls:
            self._finder.note(calls, events)
            self._reasoning = None
        elif complete and self._assumed:
            self._reasoning, self._may_begin_reasoning = None, False
            self._text.give_back("".join(self._assumed))
            return True
        return False

    def _close_start(self, marks: ReasoningMarks, complete: bool, events: list[Output]) -> None:
        """Close a reply that ends where reasoning might have begun."""
        held, self._held = self._held, ""
        is_text = complete and not marks.is_unmistakable
        if not is_text and is_half_a_mark(held, (marks.mark, marks.closing)):
            self._was_cut_in_mark = not complete
            return
        if (
            held
            and self._may_assume
            and not any(mark.startswith(held) for mark in (marks.mark, marks.closing))
        ):
            self._begin_assumed(marks, held, events)  # half the opener of a call is no mark of reasoning
            return
        self._begin_answer(events)
        self._finder.read(held, events)


def _unmistakable(marks: ReasoningMarks | None) -> tuple[str, ...]:
    return (marks.mark, marks.closing) if marks and marks.is_unmistakable else ()
