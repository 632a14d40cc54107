"""Provides a cursor over a complete text."""

from collections.abc import Callable

import regex

_MARKS = {mark: regex.compile(rf"\s*+{regex.escape(mark)}") for mark in "()[]{},:"}


class Cursor:
    """Takes tokens from the front of a text. Skips white space before punctuation marks."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    @property
    def rest(self) -> str:
        """The text that has not been taken."""
        return self._text[self._place :]

    def take(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        match = pattern.match(self._text, self._place)
        if match:
            self._place = match.end()
        return match

    def takes(self, mark: str) -> bool:
        """Take a bracket, a comma or a colon if it comes next, and return True."""
        return self.take(_MARKS[mark]) is not None

    def need(self, mark: str) -> None:
        if not self.takes(mark):
            raise ValueError(f"there is no {mark!r}")

    def items[Item](self, end: str, item: Callable[[], Item]) -> list[Item]:
        """Return all items up to the closing bracket. A trailing comma is allowed."""
        items: list[Item] = []
        while not self.takes(end):
            if items:
                self.need(",")
                if self.takes(end):
                    break
            items.append(item())
        return items
