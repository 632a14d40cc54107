"""Parses calls in Python's notation, `NAME(key='text', other=[1, None])`, with literals only.

Nothing is evaluated. Text with stars, other calls, names or string prefixes is not a call. Arguments without
names are those of the tool's schema, in its order.
"""

from collections.abc import Mapping, Sequence

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.json_calls import Objects, ParsedCall, TypedObjectReader
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.lists import SPACE, list_end
from start_llm.formats.reading.literals import Literals

KEY = r"[\w.\-]{1,256}"
_NAME = rf"(?P<name>{KEY})"
_ARGUMENTS = rf"\({SPACE}(?:\)|{KEY}{SPACE}=[^=]|['\"])"

_QUOTES = ('"""', "'''", '"', "'")
_OUTSIDE = regex.compile(
    r"""\"{3}|'{3}|""(?=[^"])|''(?=[^'])|"(?=[^"])|'(?=[^'])|[()\[\]{}]|[^\s\w+\-.,:="']"""
)
_INSIDE = {quote: regex.compile(rf"\\.|{quote}", regex.DOTALL) for quote in _QUOTES}
_OPENING = {"[": "]", "{": "}"}

_ARGUMENT = regex.compile(rf"\s*+({KEY})\s*+=")
_LETTERS: Mapping[str, str] = {
    "\n": "", "\\": "\\", "'": "'", '"': '"',
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    **{f"{code:0{digits}o}": chr(code) for digits in (1, 2, 3) for code in range(8**digits)},
}  # fmt: skip
"""All that Python unescapes, but for names of characters."""


class ArgumentsScanner:
    """Finds the end of the arguments of a call, starting at their opening bracket."""

    def __init__(self) -> None:
        self._held = ""
        self._length = 0
        self._quote = ""
        self._brackets: list[str] = []

    def feed(self, text: str) -> int | None:
        buffer, self._held = self._held + text, ""
        place = 0
        while place < len(buffer):
            pattern = _INSIDE[self._quote] if self._quote else _OUTSIDE
            token = pattern.search(buffer, place, partial=True)
            if token is None or token.partial:
                self._hold(buffer, token.start() if token else len(buffer))
                return None
            place = token.end()
            self._read(token[0])
            if not self._brackets:
                return self._length + place
        self._length += len(buffer)
        return None

    def _hold(self, buffer: str, start: int) -> None:
        self._length += start
        self._held = buffer[start:]

    def _read(self, mark: str) -> None:
        if self._quote:
            self._quote = "" if mark == self._quote else self._quote
        elif mark in _QUOTES:
            self._quote = mark
        elif mark in _OPENING or (mark == "(" and not self._brackets):
            self._brackets.append(_OPENING.get(mark, ")"))
        elif mark not in ('""', "''") and (not self._brackets or self._brackets.pop() != mark):
            raise ValueError(f"{mark!r} stands outside a text")


def as_json(text: str) -> str:
    """Convert the bracketed arguments of a call to JSON.

    Raises:
        ValueError: they contain more than literals.
    """
    return written(_Arguments(text).arguments())


class _Arguments(Literals):
    """Parses the arguments of a call."""

    letters = _LETTERS

    def __init__(self, text: str, order: Sequence[str] = ()) -> None:
        super().__init__(text)
        self._order = list(order)

    def arguments(self) -> dict[str, Json]:
        self.need("(")
        return dict(self.items(")", self._argument))

    def _argument(self) -> tuple[str, Json]:
        key = self.take(_ARGUMENT)
        if key is not None:
            self._order = []  # behind a name every argument has one
            return key[1], self.value()
        if not self._order:
            raise ValueError("an argument has no name")
        return self._order.pop(0), self.value()


def call_list(mark: str = "") -> Objects:
    """Return the patterns for `[NAME(…), NAME(…)]` and the mark that ends it, if there is one."""
    return Objects(
        head=rf"(?:{SPACE}[\[,])?{SPACE}{_NAME}(?={_ARGUMENTS})",
        next_call=rf"{SPACE},{SPACE}(?={KEY}\()",
        block_end=list_end(mark),
        span=ArgumentsScanner,
        arguments=as_json,
    )


def call_lines(mark: str) -> Objects:
    """Return the patterns for one call per line and the mark that ends them."""
    return Objects(
        head=rf"{SPACE}{_NAME}(?={_ARGUMENTS})",
        next_call=rf"{SPACE}(?={KEY}\()",
        block_end=SPACE + regex.escape(mark),
        span=ArgumentsScanner,
        arguments=as_json,
    )


class PythonCallReader(TypedObjectReader):
    """Parses calls in Python's notation."""

    def _read_call(self, text: str) -> ParsedCall | None:
        return super()._read_call(text) or self._positional_call(text)

    def _positional_call(self, text: str) -> ParsedCall | None:
        name = self._name and self._tools.meant(self._name)
        if not name:
            return None
        order = self._tools.arguments(name)
        try:
            call = ParsedCall(name, written(_Arguments(text, order).arguments()))
        except (ValueError, RecursionError):
            return None
        self.was_repaired = True
        return call
