"""A place in a text that is read from its beginning to its end."""

from __future__ import annotations

from collections.abc import Callable

import regex

_MARKS = {mark: regex.compile(rf"\s*+{regex.escape(mark)}") for mark in "()[]{},:"}


class Cursor:
    """Takes what comes next. White space in front of marks does not count."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    @property
    def rest(self) -> str:
        """What has not been taken."""
        return self._text[self._place :]

    def take(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        match = pattern.match(self._text, self._place)
        if match:
            self._place = match.end()
        return match

    def takes(self, mark: str) -> bool:
        """Take a bracket, a comma or a colon, if it comes next."""
        return self.take(_MARKS[mark]) is not None

    def need(self, mark: str) -> None:
        if not self.takes(mark):
            raise ValueError(f"there is no {mark!r}")

    def items[Item](self, end: str, item: Callable[[], Item]) -> list[Item]:
        """All up to the bracket that ends them; behind the last one there may be a comma."""
        items: list[Item] = []
        while not self.takes(end):
            if items:
                self.need(",")
                if self.takes(end):
                    break
            items.append(item())
        return items
