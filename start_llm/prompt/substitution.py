"""Writes texts for words in a prompt, and tells where everything else has moved.

Such words stand for the marks in clients' texts while a template renders; see `prompt.client_marks`.
"""

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
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


_BEGIN = f"mark{secrets.token_hex(16)}n"
"""Random in each process and in no prompt, so no text can contain it."""
_ANY = re.compile(rf"{_BEGIN}([0-9a-f]+)x")


def word_of(mark: str) -> str:
    return f"{_BEGIN}{mark.encode().hex()}x"


def mark_of(word: re.Match[str]) -> str:
    return bytes.fromhex(word[1]).decode()


def mark_words(text: str) -> Iterator[re.Match[str]]:
    """Find the words of marks in a text."""
    return _ANY.finditer(text) if _BEGIN in text else iter(())


def with_marks(text: str) -> str:
    """Return a text with its marks, for those who do not tokenise it."""
    return _ANY.sub(mark_of, text) if _BEGIN in text else text
