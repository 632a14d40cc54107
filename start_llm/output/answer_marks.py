"""Removes the marks that a model writes around a constrained answer. A state machine without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from start_llm.core.events import Content, Output
from start_llm.core.markers import longest_beginning
from start_llm.output.calls import is_half_a_mark


class AnswerUnwrapper:
    """Removes marks only at the start and the end of the answer; the text between may quote them.

    Args:
        pairs: marks that may come before and after an answer (`Family.around_answer`).

    Attributes:
        was_cut: the reply ended inside a mark.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        self._is_first = bool(pairs)
        self._after = ""
        self._held = ""
        self.was_cut = False

    def without(self, events: Sequence[Output]) -> list[Output]:
        """Return these events with the marks removed from their contents."""
        return list(self._without(events))

    def close(self, complete: bool) -> list[Output]:
        """End the reply. Return the held text, unless it is a mark or, in a cut reply, the start of one."""
        held, self._held = self._held, ""
        marks = [before for before, _ in self._pairs] if self._is_first else [self._after]
        if not held or held in marks:
            return []
        self.was_cut = not complete and is_half_a_mark(held, marks)
        return [] if self.was_cut else [Content(held)]

    def _without(self, events: Sequence[Output]) -> Iterator[Output]:
        for event in events:
            if not isinstance(event, Content):
                yield event
            elif text := self._said(event.text):
                yield Content(text)

    def _said(self, text: str) -> str:
        buffer, self._held = self._held + text, ""
        if self._is_first:
            if any(before.startswith(buffer) and before != buffer for before, _ in self._pairs):
                self._held = buffer
                return ""
            self._is_first = False
            pair = next((pair for pair in self._pairs if buffer.startswith(pair[0])), ("", ""))
            self._after, buffer = pair[1], buffer.removeprefix(pair[0])
        if not self._after:
            return buffer
        is_over = buffer.endswith(self._after)
        keep = len(self._after) if is_over else longest_beginning(buffer, (self._after,))
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]
