"""Reads text that is almost JSON, where it can mean only one thing."""

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.cursor import Cursor
from start_llm.formats.reading.json_text import parsed, written
from start_llm.formats.reading.literals import CONSTANTS, unescaped

_DEEPEST = 64
_COMMENTS = regex.compile(r"(?:\s*+(?://[^\n]*+|/\*.*?\*/))*+", regex.DOTALL)
_TEXT = regex.compile(r'\s*+"((?:[^"\\]|\\.)*+)"', regex.DOTALL)
_QUOTED = regex.compile(r"\s*+('(?:[^'\\]|\\.)*+')(?=\s*+(?:[,:}\]/]|$))", regex.DOTALL)
_NOTHING = regex.compile(r"\s*+\Z")
_KEY = regex.compile(r"\s*+([A-Za-z_]\w*+)(?=\s*+:)")
_WORD = regex.compile(r"\s*+([\w.+\-]++)")
_NUMBER = regex.compile(r"-?(?:\d++(?:\.\d++)?(?:[eE][+\-]?\d++)?|Infinity|NaN)")
_ESCAPE = regex.compile(r"\\(u[\da-fA-F]{4}|.)", regex.DOTALL)
_LETTERS = '"\\/bfnrt'
_DRIVE = regex.compile(r"[A-Za-z]:\\(?!\\)|\\\\(?!\\)[\w.\-]+\\(?!\\)")
_PATH = regex.compile(r"[\w.~\-]*+(?:\\[\w.\- ]++)++")
_BLANKS = frozenset("nrt")


def almost_json(text: str) -> str:
    r"""Return the JSON of an object that is almost JSON.

    It may have comments, a comma behind the last member, single quotes, names without quotes, Python's
    constants, escapes that JSON does not know, and lack brackets at its end. A number that is none in JSON,
    or that no float holds, stays a text.

    Raises:
        ValueError: the text is something else, or has two readings, such as the path `src\utils\new`.
    """
    cursor = _Almost(text)
    value = cursor.value(_DEEPEST)
    if not cursor.is_over:
        raise ValueError("something follows the value")
    return written(value)


class _Almost(Cursor):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._after_value = False

    @property
    def is_over(self) -> bool:
        self.take(_COMMENTS)
        return _NOTHING.match(self._text, self._place) is not None

    def takes(self, mark: str) -> bool:
        """Take a mark. At the end of the text every bracket closes behind a value."""
        self.take(_COMMENTS)
        if super().takes(mark):
            self._after_value = mark in "}]"
            return True
        return mark in "}]" and self.is_over and self._after_value

    def value(self, depth: int) -> Json:
        self.take(_COMMENTS)
        if depth == 0:
            raise ValueError("a value is nested too deeply")
        if self.is_over:
            raise ValueError("a value is missing")
        if self.takes("{"):
            return dict(self.items("}", lambda: self._member(depth - 1)))
        if self.takes("["):
            return self.items("]", lambda: self.value(depth - 1))
        text = self._string()
        value = self._constant() if text is None else text
        self._after_value = True
        return value

    def _member(self, depth: int) -> tuple[str, Json]:
        self.take(_COMMENTS)
        key = self._string()
        if key is None:
            name = self.take(_KEY)
            if name is None:
                raise ValueError("a member has no name")
            key = name[1]
        self.need(":")
        return key, self.value(depth)

    def _string(self) -> str | None:
        if text := self.take(_TEXT):
            return _unescaped(text[1])
        quoted = self.take(_QUOTED)
        return unescaped(quoted[1][1:-1]) if quoted else None

    def _constant(self) -> Json:
        word = self.take(_WORD)
        if word is None:
            raise ValueError("a value is missing")
        if word[1] in CONSTANTS:
            return CONSTANTS[word[1]]
        if not _NUMBER.fullmatch(word[1]):
            raise ValueError(f"{word[1]!r} is no value")
        try:
            return parsed(word[1])
        except ValueError:
            return word[1]


def _unescaped(text: str) -> str:
    """Return the text of a string. Backslashes that begin no escape of JSON are characters.

    In a path of Windows none begins one, and `\\b` and `\\f` begin none beside an unknown escape: they
    are a word's border and a path in all that models write.
    """
    if all(_is_known(escape[1]) for escape in _ESCAPE.finditer(text)):
        return str(parsed(f'"{text}"'))
    letters = {escape[1] for escape in _ESCAPE.finditer(text)}
    if _DRIVE.match(text):
        return text.replace('\\"', '"')
    if _PATH.fullmatch(text) and letters & _BLANKS:
        raise ValueError("a path or a text with line breaks")
    return str(parsed('"' + _ESCAPE.sub(_kept, text) + '"'))


def _is_known(escape: str) -> bool:
    return escape in _LETTERS or (len(escape) > 1)


def _kept(escape: regex.Match[str]) -> str:
    is_escape = _is_known(escape[1]) and escape[1] not in "bf"
    return escape[0] if is_escape else "\\" + escape[0]
