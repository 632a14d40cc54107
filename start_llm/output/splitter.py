"""Separates a reply into thought, answer and calls. State machines without I/O: text in, events out.

How the text was cut into pieces never changes what comes out, only how early. Streamed replies and whole ones
go through the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from start_llm.core.events import Content, Output, Reasoning
from start_llm.core.family import Family, ThoughtMarks
from start_llm.formats.reading.schema import Tools
from start_llm.formats.registry import ordered
from start_llm.output.around_answer import AroundAnswer
from start_llm.output.blocks import CallFormats
from start_llm.output.calls import CallFinder, is_half_a_mark
from start_llm.output.channels import ChannelSplitter
from start_llm.output.rereading import RereadableText
from start_llm.output.spacing import TrailingSpace
from start_llm.output.thought import OpenThought


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
    return TagSplitter(
        family,
        tools,
        thought_is_open=thought_is_open,
        thinking=thinking,
        calls_come_first=calls_come_first,
    )


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
    """Thoughts between two marks, then the answer.

    Marks that models also write about are marks only where nothing of the answer has come yet, so an answer
    may talk about them. Unmistakable ones (`ThoughtMarks`) are marks in an answer too: there, another thought
    may stand, and a closing mark that closes nothing is dropped. So are the marks around an answer. Newlines
    next to a thought are the template's.

    A family with `orphan_close` may begin inside its thought although nothing opened one. Then a thought is
    assumed until its close comes; if it never does, what was taken for a thought was the answer, and is also
    given as that, unless the reply was cut.

    Args:
        calls_come_first: an answer that does not begin with a call has none. Such a reply is held to its
            form, and there are no marks in its answer, only around it.
    """

    def __init__(
        self,
        family: Family,
        tools: Tools,
        *,
        thought_is_open: bool,
        thinking: bool,
        calls_come_first: bool = False,
    ) -> None:
        self._marks = family.thought
        self._answer_marks = family.answer_marks
        self._formats = CallFormats(ordered(family.formats), tools)
        self._no_calls = CallFormats((), tools)
        self._text = RereadableText()
        in_answer = () if calls_come_first else (*_unmistakable(family.thought), *family.answer_marks)
        self._finder = CallFinder(
            self._formats, self._text, marks=in_answer, calls_come_first=calls_come_first
        )
        self._around = AroundAnswer(family.around_answer if calls_come_first else ())
        self._may_assume = family.orphan_close and thinking and not thought_is_open
        self._thought: OpenThought | None = None
        self._may_begin_thought = family.thought is not None
        self._held = ""
        self._space = TrailingSpace()
        self._assumed: list[str] | None = None
        self._behind_thought = False
        self._was_cut_in_mark = False
        if thought_is_open and family.thought:
            self._thought = self._opened(family.thought)

    @property
    def in_thought(self) -> bool:
        return self._thought is not None

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
        return self._finder.was_cut_in_block or self._was_cut_in_mark or self._around.was_cut

    def feed(self, text: str) -> list[Output]:
        events: list[Output] = []
        self._text.append(text)
        self._read(events)
        return self._around.without(events)

    def close(self, complete: bool) -> list[Output]:
        events: list[Output] = []
        while self._end_part(complete, events):
            self._read(events)
        self._finder.close(complete, events)
        return [*self._around.without(events), *self._around.close(complete)]

    def _read(self, events: list[Output]) -> None:
        """Everything that there is to read."""
        while piece := self._text.next_piece():
            if self._thought:
                self._read_thought(self._thought, piece, events)
            elif self._may_begin_thought and self._marks:
                self._read_start(self._marks, piece, events)
            else:
                self._read_answer(piece, events)

    def _opened(self, marks: ThoughtMarks) -> OpenThought:
        return OpenThought(marks, self._text, self._formats, self._answer_marks)

    def _read_start(self, marks: ThoughtMarks, piece: str, events: list[Output]) -> None:
        """White space, then perhaps a mark of thoughts."""
        buffer, self._held = self._held + piece, ""
        begun = buffer.lstrip()
        self._space.pass_on(buffer[: len(buffer) - len(begun)])
        if begun.startswith(marks.opening):
            self._space.drop()
            self._thought = self._opened(marks)
            self._text.give_back(begun.removeprefix(marks.opening))
        elif begun.startswith(marks.closing):
            self._space.drop()
            self._end_thought()
            self._text.give_back(begun.removeprefix(marks.closing))
        elif begun and any(mark.startswith(begun) for mark in (marks.opening, marks.closing)):
            self._held = begun
        elif begun and self._may_assume:
            self._assumed = []
            self._thought = OpenThought(marks, self._text, self._no_calls)
            self._read_thought(self._thought, self._space.release() + begun, events)
        elif begun:
            self._begin_answer(events)
            self._text.give_back(begun)

    def _begin_answer(self, events: list[Output]) -> None:
        """Newlines behind a thought are dropped."""
        space = self._space.release()
        self._finder.read(space.lstrip("\n") if self._behind_thought else space, events)
        self._may_begin_thought = False

    def _read_answer(self, piece: str, events: list[Output]) -> None:
        mark = self._finder.read(piece, events)
        if self._marks and mark == self._marks.opening:
            self._thought = self._opened(self._marks)

    def _read_thought(self, thought: OpenThought, piece: str, events: list[Output]) -> None:
        before = len(events)
        is_over = thought.read(piece, events)
        self._assume(events[before:])
        if is_over:
            self._end_thought()

    def _assume(self, events: Sequence[Output]) -> None:
        """What is thought may turn out to be the answer."""
        if self._assumed is not None:
            self._assumed += [event.text for event in events if isinstance(event, Reasoning)]

    def _end_thought(self) -> None:
        """Behind a thought there may be another one."""
        self._thought, self._assumed, self._may_assume = None, None, False
        self._may_begin_thought = self._behind_thought = True

    def _end_part(self, complete: bool, events: list[Output]) -> bool:
        """The reply is over, and so is what it ends with. True if there is text to be read again."""
        if self._thought:
            return self._close_thought(self._thought, complete, events)
        if self._may_begin_thought and self._marks:
            self._close_start(self._marks, complete, events)
        return self._finder.end_block(complete, events)

    def _close_thought(self, thought: OpenThought, complete: bool, events: list[Output]) -> bool:
        before = len(events)
        calls = thought.close(complete, events)
        self._assume(events[before:])
        if calls:
            self._finder.note(calls, events)
            self._thought = None
        elif complete and self._assumed:
            self._thought, self._may_begin_thought = None, False
            self._text.give_back("".join(self._assumed))
            return True
        return False

    def _close_start(self, marks: ThoughtMarks, complete: bool, events: list[Output]) -> None:
        """The reply ends where a thought might have begun."""
        held, self._held = self._held, ""
        is_text = complete and not marks.is_unmistakable
        if not is_text and is_half_a_mark(held, (marks.opening, marks.closing)):
            self._was_cut_in_mark = not complete
            return
        self._begin_answer(events)
        self._finder.read(held, events)


def _unmistakable(marks: ThoughtMarks | None) -> tuple[str, ...]:
    return (marks.opening, marks.closing) if marks and marks.is_unmistakable else ()
