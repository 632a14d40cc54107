"""Tells whether an answer is inside quotation. A state machine without I/O."""

from __future__ import annotations

import regex

_TOKENS = regex.compile(r"`+|\n")
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
        for token in _TOKENS.finditer(text):
            if token.start() or token[0] == "\n":
                self._end_ticks()
            if token[0] == "\n":
                self._in_code = False
            else:
                self._ticks += len(token[0])
        if not text.endswith("`"):
            self._end_ticks()
        self._last = text[-1:] or self._last

    def _end_ticks(self) -> None:
        self._in_fence, self._in_code = self._after_ticks()
        self._ticks = 0

    def _after_ticks(self) -> tuple[bool, bool]:
        if self._ticks >= _FENCE:
            return not self._in_fence, False
        return self._in_fence, self._in_code ^ bool(self._ticks and not self._in_fence)
