"""When a reply has thought long enough. A state machine without I/O."""

from __future__ import annotations

from typing import Literal

from start_llm.core.job import ThoughtLimit


class ThoughtWatch:
    """Follows the text of one reply through its thought and says when the thought has to be closed.

        before ──opening──▶ open ──closing, or the limit──▶ over
           └───any other text────────────────────────────────▲

    Both marks may be cut into any pieces. Nothing is held back, and no more text is kept than a mark needs.
    """

    def __init__(self, limit: ThoughtLimit) -> None:
        self._limit = limit
        self._stage: Literal["before", "open", "over"] = "open" if limit.starts_open else "before"
        self._tail = ""
        self._tokens = 0

    def feed(self, text: str, *, is_inside_character: bool = False) -> tuple[int, ...]:
        """Take the text of one more token, which may be empty.

        Args:
            is_inside_character: the token ends within a character, which is no place to close a thought.

        Returns:
            The tokens that must follow it, whatever the model would say: those that close the thought, once,
            and none at any other time.
        """
        if self._stage == "over":
            return ()
        self._tokens += 1
        self._tail += text
        if self._stage == "before":
            self._look_for_opening()
        if self._stage == "open":
            self._look_for_closing()
        if self._stage != "open" or self._tokens < self._limit.most_tokens or is_inside_character:
            return ()
        self._stage = "over"
        return self._limit.closing_tokens

    def _look_for_opening(self) -> None:
        self._tail = self._tail.lstrip()
        if self._tail.startswith(self._limit.opening):
            self._stage = "open"
            self._tail = self._tail.removeprefix(self._limit.opening)
        elif not self._limit.opening.startswith(self._tail):
            self._stage = "over"

    def _look_for_closing(self) -> None:
        if self._limit.closing in self._tail:
            self._stage = "over"
        else:
            most = len(self._limit.closing) - 1
            self._tail = self._tail[max(0, len(self._tail) - most) :]
