"""What tells a text to somebody who has read an earlier one that differs from it in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

_MOST_LINES = 500
"""Comparing takes the square of it at worst."""
_MOST_CONTEXT = 3


def changed_lines(before: str, now: str) -> str | None:
    """Like a unified diff: `-` a line that holds no longer, `+` a new one in its place, ` ` one before it.

    Read from top to bottom, each line that is not new is the next such line of `before`: a piece begins with
    one that `before` has once, so there is only one text that can be meant. None if no such lines are there,
    or the texts are too long to be compared.
    """
    old, new = before.split("\n"), now.split("\n")
    if max(len(old), len(new)) > _MOST_LINES:
        return None
    told: list[str] = []
    free = 0
    for kind, first, end, start, stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        place = _beginning(old, max(free, first - _MOST_CONTEXT), first, end)
        if place is None:
            return None
        told += [f" {line}" for line in old[place:first]]
        told += [f"-{line}" for line in old[first:end]] + [f"+{line}" for line in new[start:stop]]
        free = end
    return "\n".join(told)


def _beginning(old: Sequence[str], earliest: int, first: int, end: int) -> int | None:
    """Where a piece about the lines from `first` to `end` begins: at one that is there once."""
    places = range(min(first, end - 1), earliest - 1, -1)
    return next((place for place in places if old.count(old[place]) == 1), None)
