"""Hands out a text in pieces, and again where a parser gives it back. A state machine without I/O.

A long text may look like a call before it turns out to be text. It may contain a valid call, so it is given
back and read again, and the same may happen at the next opener. Without a limit the work would grow with the
square of the text, so there is a budget that grows with the text.

The text is counted in cells of fixed size. The piece that rules out a call lies in a single cell, so the text
that is read again does not depend on how the input was split.
"""

from itertools import pairwise

CELL = 1_024
"""Characters. No piece crosses the end of a cell."""
FREE_CELLS = 2
"""Giving back text that touches at most this many cells is free."""
BUDGET = 128
"""Cells that every reply may read again, plus one for each cell that is given back for the first time."""


class RereadableText:
    """A text in pieces, of which parts can be given back and read again."""

    def __init__(self) -> None:
        self._place = 0
        self._pieces: list[str] = []
        self._budget = BUDGET
        self._given_back = 0

    @property
    def is_used_up(self) -> bool:
        """True if the budget is spent and the last piece was read before; no call attempt may begin in it."""
        return self._is_read_again and self._budget <= 0

    @property
    def _is_read_again(self) -> bool:
        return self._place <= self._given_back * CELL

    def append(self, text: str) -> None:
        """Add text after everything that was handed out. No piece may be left."""
        self._cut(text)

    def _cut(self, text: str) -> None:
        """Split a text that begins at the current position, and put its pieces before all others."""
        first = CELL - self._place % CELL
        if len(text) <= first:
            self._pieces.append(text)
            return
        cuts = [0, *range(first, len(text), CELL), len(text)]
        self._pieces += reversed([text[start:end] for start, end in pairwise(cuts)])

    def next_piece(self) -> str:
        """Return the next piece, or the empty string at the end."""
        piece = self._pieces.pop() if self._pieces else ""
        self._place += len(piece)
        return piece

    def everything_left(self) -> str:
        """Return all remaining pieces as one text."""
        return "".join(iter(self.next_piece, ""))

    def begin_attempt(self) -> None:
        """Record that a call may begin in the last piece. In text that is read again this costs one cell."""
        self._budget -= self._is_read_again

    def give_back(self, text: str) -> None:
        """Take back the end of the text that was handed out."""
        if not text:
            return
        end = -(-self._place // CELL)
        self._place -= len(text)
        start = self._place // CELL
        if end - start > FREE_CELLS:
            self._charge(start, end)
        self._cut(text)

    def _charge(self, start: int, end: int) -> None:
        """Charge for cells `start` to `end`, which are read again. First-time cells add to the budget."""
        new = max(0, end - max(start, self._given_back))
        self._budget += new - (end - start - new)
        self._given_back = max(self._given_back, end)
