"""Removes the marks that a model writes around a constrained answer. A state machine without I/O."""

from collections.abc import Sequence

from start_llm.core.events import Content, Output
from start_llm.core.markers import longest_beginning
from start_llm.output.calls import is_half_a_mark


class AnswerUnwrapper:
    """Removes marks only at the start and the end of the answer; the text between may quote them.

    Args:
        pairs: marks that may come before and after an answer (`Family.around_answer`).

    Attributes:
        was_cut: the reply was cut inside a mark, or before the mark after the answer.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        self._is_first = bool(pairs)
        self._ends: tuple[str, ...] = ()
        self._held = ""
        self.was_cut = False

    def without(self, events: Sequence[Output]) -> list[Output]:
        """Return these events with the marks removed from their contents."""
        kept: list[Output] = []
        for event in events:
            if not isinstance(event, Content):
                kept.append(event)
            elif text := self._without_marks(event.text):
                kept.append(Content(text))
        return kept

    def close(self, complete: bool) -> list[Output]:
        """End the reply. Return the held text, unless it is a mark or, in a cut reply, the start of one."""
        held, self._held = self._held, ""
        marks = tuple(before for before, _ in self._pairs) if self._is_first else self._ends
        is_mark, is_half = held.rstrip() in marks, not complete and is_half_a_mark(held, marks)
        self.was_cut = not complete and bool(is_half or self._ends) and (self._is_first or not is_mark)
        return [] if is_half or is_mark or not held else [Content(held)]

    def _without_marks(self, text: str) -> str:
        buffer, self._held = self._held + text, ""
        if self._is_first:
            if any(before.startswith(buffer) and before != buffer for before, _ in self._pairs):
                self._held = buffer
                return ""
            self._is_first = False
            pair = next((pair for pair in self._pairs if buffer.startswith(pair[0])), ("", ""))
            # A newline before the last mark is part of it, and lacks where a call stands between them.
            self._ends = tuple(dict.fromkeys((pair[1], pair[1].lstrip("\n")))) if pair[1] else ()
            buffer = buffer.removeprefix(pair[0])
        if not self._ends:
            return buffer
        stripped = buffer.rstrip()
        mark = next((end for end in self._ends if stripped.endswith(end)), None)
        end = len(stripped) - len(mark) if mark else len(buffer) - longest_beginning(buffer, self._ends)
        self._held = buffer[end:]
        return buffer[:end]
