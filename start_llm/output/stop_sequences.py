"""Finds stop strings in the text of an answer. A state machine without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.markers import longest_beginning


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Text that is safe to send, and the stop string that completed, if any."""

    text: str
    stop: str | None = None


class StopSequenceMatcher:
    """Holds back the longest suffix that could begin a stop string.

    The match that completes first wins; of two that complete together, the longer. So the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        if not self._stops:
            return StopMatch(text)
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, stop = match
            self._held = ""
            return StopMatch(buffer[:start], stop)
        keep = longest_beginning(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return StopMatch(buffer[: len(buffer) - keep])

    def close(self) -> str:
        """Return the text still held back. No more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        """Return the start of the match and the stop string."""
        found = [
            (start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0
        ]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop
