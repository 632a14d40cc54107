"""Find markers in text that arrives in pieces."""

import re
from collections.abc import Sequence
from functools import lru_cache


def longest_beginning(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a marker.

    The caller has to hold this suffix back until more text arrives.
    """
    size, longest = len(text), 0
    for marker in markers:
        start = text.find(marker[:1], max(0, size - len(marker) + 1), size - longest)
        while start >= 0:
            if marker.startswith(text[start:]):
                longest = size - start
                break
            start = text.find(marker[:1], start + 1, size - longest)
    return longest


def first_marker(text: str, markers: Sequence[str], *, goes_on: bool = True) -> tuple[int, str] | None:
    """Return the position of the first marker and the marker; of two at one position, the longer.

    Args:
        goes_on: more text may follow. None then, too, while the marker may become a longer one.
    """
    match = any_of(tuple(markers)).search(text)
    if match is None:
        return None
    rest = text[match.start() :]
    may_be_longer = goes_on and longest_beginning(rest, markers) == len(rest)
    return None if may_be_longer else (match.start(), match[0])


@lru_cache(maxsize=64)
def any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for these texts, the longest first; it matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
