"""Describes the changed lines of a text to a reader who knows the earlier version."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

_MAX_LINES = 500
"""Comparison time grows with the square of the lines in the worst case."""
_MAX_CONTEXT = 3


def changed_lines(before: str, now: str) -> str | None:
    """Return the changed lines in a form like a unified diff, or None if no clear one exists.

    `-` marks a removed line, `+` a new line, ` ` an unchanged line before them. Each hunk begins with a line
    that occurs once in `before`, at most three lines above the change, so the hunks have only one meaning.
    None if a hunk has no such line or a text has more than 500 lines.
    """
    old, new = before.split("\n"), now.split("\n")
    if max(len(old), len(new)) > _MAX_LINES:
        return None
    told: list[str] = []
    free = 0
    for kind, first, end, start, stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        place = _beginning(old, max(free, first - _MAX_CONTEXT), first, end)
        if place is None:
            return None
        told += [f" {line}" for line in old[place:first]]
        told += [f"-{line}" for line in old[first:end]] + [f"+{line}" for line in new[start:stop]]
        free = end
    return "\n".join(told)


def _beginning(old: Sequence[str], earliest: int, first: int, end: int) -> int | None:
    """Return the index of the last line up to `first` that occurs once: there the hunk begins."""
    places = range(min(first, end - 1), earliest - 1, -1)
    return next((place for place in places if old.count(old[place]) == 1), None)
