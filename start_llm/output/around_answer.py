"""Takes off what a model writes around an answer that is held to its form. A state machine without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from start_llm.core.events import Content, Output
from start_llm.core.markers import longest_beginning
from start_llm.output.calls import is_half_a_mark


class AroundAnswer:
    """Only the two ends of the answer count: in between, a text of the answer may quote the marks.

    Args:
        pairs: what may stand in front of an answer and behind it (`Family.around_answer`).

    Attributes:
        was_cut: the reply ended in a mark.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        self._is_first = bool(pairs)
        self._behind = ""
        self._held = ""
        self.was_cut = False

    def without(self, events: Sequence[Output]) -> list[Output]:
        """These events, their contents without the marks."""
        return list(self._without(events))

    def close(self, complete: bool) -> list[Output]:
        """The reply is over: what is held counts, unless it is a mark."""
        held, self._held = self._held, ""
        marks = [before for before, _ in self._pairs] if self._is_first else [self._behind]
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
            self._behind, buffer = pair[1], buffer.removeprefix(pair[0])
        if not self._behind:
            return buffer
        is_over = buffer.endswith(self._behind)
        keep = len(self._behind) if is_over else longest_beginning(buffer, (self._behind,))
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]
