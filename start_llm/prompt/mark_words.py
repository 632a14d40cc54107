"""Words that stand for the marks in clients' texts while a template renders; see `prompt.client_marks`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

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
