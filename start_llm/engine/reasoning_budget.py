"""Limit the length of a reply's reasoning. A state machine without I/O."""

from __future__ import annotations

from math import inf
from typing import Literal

from start_llm.core.engine_request import ReasoningLimit


class ReasoningBudget:
    """Follows the text of one reply through its reasoning and tells when to close the reasoning.

        before ──opening──▶ open ──closing, or the limit──▶ over
           └───any other text────────────────────────────────▲

    The markers may arrive in any number of pieces. No text is held back, and only as much text is kept as a
    marker needs.
    """

    def __init__(self, limit: ReasoningLimit) -> None:
        self._limit = limit
        self._stage: Literal["before", "open", "over"] = "open" if limit.starts_open else "before"
        self._tail = ""
        self._tokens = 0

    @property
    def tokens_left(self) -> float:
        """The tokens that can come before reasoning may have to be closed; infinite if it is over."""
        return inf if self._stage == "over" else self._limit.max_reasoning_tokens - self._tokens

    def feed(self, text: str, *, is_inside_character: bool = False) -> tuple[int, ...]:
        """Take the text of one more token, which may be empty.

        Args:
            is_inside_character: the token ends within a character, where reasoning cannot be closed.

        Returns:
            The forced tokens that close the reasoning, once, when the limit is reached; otherwise none.
        """
        if self._stage == "over":
            return ()
        self._tokens += 1
        self._tail += text
        if self._stage == "before":
            self._look_for_opening()
        if self._stage == "open":
            self._look_for_closing()
        if self._stage != "open" or self._tokens < self._limit.max_reasoning_tokens or is_inside_character:
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
