"""Lay out rows of text and sizes for a terminal."""

from collections.abc import Iterable, Sequence


def columns(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield rows with their cells below each other."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def binary_size(nbytes: int) -> str:
    """Return a number of bytes in GiB, or in MiB if it is less than one."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"
