"""Parses literals in Python's notation: `{'a': [True, None]}`."""

from collections.abc import Mapping
from functools import partial

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.cursor import Cursor
from start_llm.formats.reading.json_text import parsed

_DEEPEST = 64
_TEXT = regex.compile(
    r'''\s*+(?:"""(?P<text>(?:[^"\\]++|\\.|"(?!""))*+)"""|\'{3}(?P<text>(?:[^'\\]++|\\.|'(?!''))*+)\'{3}'''
    r"""|"(?P<text>(?:[^"\\]++|\\.)*+)"|'(?P<text>(?:[^'\\]++|\\.)*+)')""",
    regex.DOTALL,
)
_WORD = regex.compile(r"\s*+([\w.+\-]++)")
_ZEROS = regex.compile(r"^(-?)0+(?=\d)")
"""Zeros before a number, which models write as in dates. Neither Python nor JSON allows them."""
_ESCAPE = regex.compile(
    r"\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U(00(?:0[\da-fA-F]|10)[\da-fA-F]{4})|(?P<letter>[0-7]{1,3}|.))",
    regex.DOTALL,
)
CONSTANTS: Mapping[str, Json] = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
"""As Python and as JSON write them: models mix the two."""
_LETTERS: Mapping[str, str] = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


def literal(text: str) -> Json:
    """Parse a literal.

    Raises:
        ValueError: the text is none, or a value stands in more than 64 others.
    """
    cursor = Literals(text)
    value = cursor.value(_DEEPEST + 1)
    if cursor.rest.strip():
        raise ValueError("something follows the value")
    return value


def unescaped(text: str, letters: Mapping[str, str] = _LETTERS) -> str:
    """Return what a text between Python's quotes says.

    JSON escapes surrogate pairs one by one: they are joined.

    Args:
        letters: what an escape means, by what stands behind its backslash; others stay as they are.
    """
    whole = _ESCAPE.sub(partial(_character, letters), text)
    return whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _character(letters: Mapping[str, str], escape: regex.Match[str]) -> str:
    letter = escape["letter"]
    if letter is None:
        return chr(int(escape[0][2:], base=16))
    return letters.get(letter, escape[0])


class Literals(Cursor):
    """Takes literals from the front of a text."""

    letters: Mapping[str, str] = _LETTERS

    def value(self, depth: int = _DEEPEST) -> Json:
        """Take a literal that has at most `depth` levels, of which a number or a text is one."""
        if depth == 0:
            raise ValueError("a value is nested too deeply")
        if self.takes("["):
            return self.items("]", lambda: self.value(depth - 1))
        if self.takes("{"):
            return dict(self.items("}", lambda: self._member(depth - 1)))
        text = self.take(_TEXT)
        return self._constant() if text is None else unescaped(text["text"], self.letters)

    def _member(self, depth: int) -> tuple[str, Json]:
        key = self.take(_TEXT)
        if key is None:
            raise ValueError("a member has no name")
        self.need(":")
        return unescaped(key["text"], self.letters), self.value(depth)

    def _constant(self) -> Json:
        word = self.take(_WORD)
        if word is None:
            raise ValueError("a value is missing")
        return CONSTANTS[word[1]] if word[1] in CONSTANTS else parsed(_ZEROS.sub(r"\1", word[1]))
