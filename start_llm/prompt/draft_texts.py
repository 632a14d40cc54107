"""Tool results as a reply repeats them: without line numbers and without the marks of a diff.

A tool that reads a file puts a number before each line, so that what an edit repeats of it breaks off at each
line. Such results are encoded a second time, for drafts alone: nothing of it reaches a prompt.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from itertools import pairwise

from start_llm.core.chat import Message
from start_llm.core.recently_used import RecentlyUsed
from start_llm.prompt.template import PromptTokenizer

_NUMBER = re.compile(r"^ *(\d{1,9})(→|\t|:| ?\|)", re.MULTILINE)
_WITHOUT_BLANK = re.compile(r"^ *\d{1,9}(?:→|\t|:| ?\|)[^ \n]", re.MULTILINE)
_HUNK = re.compile(r"^@@ [-+ ,\d]+ @@", re.MULTILINE)
_BLANK = re.compile(r"^ ", re.MULTILINE)
"""Of the number, if it is before every line."""
_MARKED = re.compile(r"^[-+ ]", re.MULTILINE)
_FEWEST_LINES = 3
_MOST_TOKENS = 2**20
"""Tokens that are remembered for the next requests."""


class DraftTexts:
    """Encodes and remembers them. Safe to use from any thread."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = RecentlyUsed[bytes, array[int]](_MOST_TOKENS, _weight)

    def of(self, messages: Sequence[Message]) -> tuple[Sequence[int], ...]:
        """Return the tokens of the tool results that were written otherwise than they would be repeated."""
        written = (self._of(message.content) for message in messages if message.role == "tool")
        return tuple(filter(None, written))

    def _of(self, text: str) -> array[int]:
        """Return the tokens of a result without its marks; none if it has none."""
        name = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        ids = self._known.get(name)
        if ids is None:
            plain = without_marks(text)
            ids = array("I", self._tokenizer.encode_continuation(plain) if plain else ())
            self._known.put(name, ids)
        return ids


def _weight(ids: array[int]) -> int:
    return 16 + len(ids)


def without_marks(text: str) -> str | None:
    """Return a text without the numbers or the marks before its lines; None if it has none."""
    prefixes = _NUMBER.findall(text)
    numbers = [int(number) for number, _ in prefixes]
    rising = sum(later == number + 1 for number, later in pairwise(numbers))
    if rising >= _FEWEST_LINES - 1 and rising >= len(numbers) // 2:
        plain = _NUMBER.sub("", text)
        is_tight = prefixes[0][1] in ("→", "\t") or _WITHOUT_BLANK.search(text)
        return plain if is_tight else _BLANK.sub("", plain)
    return _MARKED.sub("", text) if _HUNK.search(text) else None
