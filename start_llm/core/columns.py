"""Lay out rows of text for a terminal."""

from collections.abc import Iterable, Sequence


def columns(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield rows with their cells below each other."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
