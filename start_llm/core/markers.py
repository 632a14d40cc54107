"""Find markers in text that arrives in pieces."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


def longest_beginning(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a marker.

    The caller has to hold this suffix back until more text arrives.
    """
    begun = _beginnings(tuple(markers))
    for start in range(max(0, len(text) - begun.longest), len(text)):
        if text[start] in begun.letters and text[start:] in begun.texts:
            return len(text) - start
    return 0


class _Beginnings(NamedTuple):
    """The proper prefixes of markers, their first letters, and the length of the longest."""

    texts: frozenset[str]
    letters: frozenset[str]
    longest: int


@lru_cache(maxsize=256)
def _beginnings(markers: tuple[str, ...]) -> _Beginnings:
    texts = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))
    return _Beginnings(texts, frozenset(text[0] for text in texts), max(map(len, texts), default=0))


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


@lru_cache(maxsize=256)
def any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for these texts, the longest first; it matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
