"""Writes texts for words in a prompt, and tells where everything else has moved."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Substituted:
    """A text in which something else is written for each word.

    Attributes:
        written: what was written for each word.
        starts: where that begins in `text`.
    """

    text: str
    written: list[str]
    starts: list[int]
    _ends: list[int]
    _growth: list[int]

    def moved(self, offset: int) -> int:
        """Return where a character of the text with words, in none of them, is in this one."""
        return offset + self._growth[bisect_right(self._ends, offset)]


def substitute(
    text: str, words: Iterable[re.Match[str]], writing: Callable[[re.Match[str]], str]
) -> Substituted:
    """Write a text for each of the words, which are in the order of the text."""
    pieces, written, starts = list[str](), list[str](), list[int]()
    ends, growth, after = list[int](), [0], 0
    for word in words:
        new = writing(word)
        written.append(new)
        pieces += [text[after : word.start()], new]
        starts.append(word.start() + growth[-1])
        after = word.end()
        ends.append(after)
        growth.append(growth[-1] + len(new) - len(word.group()))
    return Substituted("".join([*pieces, text[after:]]), written, starts, ends, growth)
