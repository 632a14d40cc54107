"""Tells whether an answer is inside quotation. A state machine without I/O."""

from __future__ import annotations

import regex

_TICKS = regex.compile("`+")
_FENCE = 3
_QUOTES = ("`", '"', "'")


class QuoteWatch:
    """Follows the fences and the inline code of an answer in Markdown."""

    def __init__(self) -> None:
        self._ticks = 0
        self._in_fence = self._in_code = False
        self._last = ""

    @property
    def is_inside(self) -> bool:
        """True in a fence, in inline code, and directly after a quotation mark."""
        in_fence, in_code = self._after_ticks()
        return in_fence or in_code or self._last in _QUOTES

    def note(self, text: str) -> None:
        """Read the next text. A row of backticks may go on in the text after it."""
        place = 0
        for ticks in _TICKS.finditer(text):
            self._pass(text, place, ticks.start())
            self._ticks += len(ticks[0])
            place = ticks.end()
        self._pass(text, place, len(text))
        self._last = text[-1:] or self._last

    def _pass(self, text: str, start: int, end: int) -> None:
        """Read text without backticks. Inline code ends with its line."""
        if start < end:
            self._end_ticks()
            self._in_code = self._in_code and text.find("\n", start, end) < 0

    def _end_ticks(self) -> None:
        self._in_fence, self._in_code = self._after_ticks()
        self._ticks = 0

    def _after_ticks(self) -> tuple[bool, bool]:
        if self._ticks >= _FENCE:
            return not self._in_fence, False
        return self._in_fence, self._in_code ^ bool(self._ticks and not self._in_fence)
