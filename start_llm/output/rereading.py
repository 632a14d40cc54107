"""A text in pieces, parts of which are read again. A state machine without I/O.

Much may have been read of what looks like a call before it turns out to be none. A good call may stand in
that text, so it is given back and read again, and the same may happen at the next opener. Without a limit the
work would grow with the square of the text, so there is a budget that grows with the text.

Everything is counted in cells of the text. The piece that shows that a call is none lies in one cell, so what
is read again does not depend on how the text was cut.
"""

from __future__ import annotations

from itertools import pairwise

CELL = 1_024
"""Characters. No piece reaches over the end of a cell."""
FREE_CELLS = 2
"""A text that touches no more cells than these is given back free of charge."""
BUDGET = 128
"""Cells that may be read again in every reply, and one more for each that was given back."""


class RereadableText:
    """Hands out a text in pieces, and hands out again what is given back."""

    def __init__(self) -> None:
        self._place = 0
        self._pieces: list[str] = []
        self._budget = BUDGET
        self._given_back = 0

    @property
    def is_used_up(self) -> bool:
        """Whether no attempt at a call may begin in the last piece, because too much has been read again."""
        return self._is_read_again and self._budget <= 0

    @property
    def _is_read_again(self) -> bool:
        return self._place <= self._given_back * CELL

    def append(self, text: str) -> None:
        """Take text that follows all that has been handed out. No piece may be left."""
        self._cut(text)

    def _cut(self, text: str) -> None:
        """Make pieces of a text that begins here; they come before all others."""
        first = CELL - self._place % CELL
        if len(text) <= first:
            self._pieces.append(text)
            return
        cuts = [0, *range(first, len(text), CELL), len(text)]
        self._pieces += reversed([text[start:end] for start, end in pairwise(cuts)])

    def next_piece(self) -> str:
        """The empty text at the end."""
        piece = self._pieces.pop() if self._pieces else ""
        self._place += len(piece)
        return piece

    def everything_left(self) -> str:
        """All pieces at once."""
        return "".join(iter(self.next_piece, ""))

    def begin_attempt(self) -> None:
        """A call may begin in the last piece. An attempt costs a cell where the text is read again."""
        self._budget -= self._is_read_again

    def give_back(self, text: str) -> None:
        """Take back the end of what was handed out."""
        if not text:
            return
        end = -(-self._place // CELL)
        self._place -= len(text)
        start = self._place // CELL
        if end - start > FREE_CELLS:
            self._charge(start, end)
        self._cut(text)

    def _charge(self, start: int, end: int) -> None:
        """Cells from `start` to `end` are read again. What is new among them adds to the budget."""
        new = max(0, end - max(start, self._given_back))
        self._budget += new - (end - start - new)
        self._given_back = max(self._given_back, end)
