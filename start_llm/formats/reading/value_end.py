"""Finds where a value between tags ends, also where the model forgot the end tag."""

from collections.abc import Callable
from dataclasses import dataclass

import regex

from start_llm.formats.reading.block import compiled

_LEAST_MARKUP = 3
"""Half a tag of at least this many characters is markup; a shorter one may be text."""
_FIRST = frozenset("<]\r\n")
"""The characters that the tags of all formats, and the lines that they stand on, begin with."""
_SHORT = 64
_LINE = r"\r?\n[ \t]{0,16}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TagPatterns:
    """Regular expressions of the tags that end a value. None begins with white space.

    Attributes:
        key: the start of an argument; group `key` is its name.
        tail: what may follow the last value of a block.
        call: the start of another call up to its first argument or its end; group `tool` is its name.
        has_lines: each tag stands at the start of a line. Else a tag counts wherever it stands.
    """

    key: str
    end: str
    tail: str
    call: str
    has_lines: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOf:
    """What is known of the value and its call.

    Attributes:
        marker: regular expression of the text that ends the value.
        is_due: tells whether an argument is declared and not given yet.
        is_offered: tells whether a tool is offered.
        levels: counts how many more nested elements begin in a text than end.
        is_wrapped: the value stands in a wrapper for markup, so nothing but the marker ends it.
    """

    marker: str
    is_due: Callable[[str], bool]
    is_offered: Callable[[str], bool]
    levels: Callable[[str], int]
    is_wrapped: bool


class EndFinder:
    """Searches a buffer that grows at its end and loses text at its front.

    A value ends at its marker if another argument or the end of the call follows. Without the marker it ends

    - before a declared argument that the call does not have yet, at once;
    - before the end of the call, or before another call, if the reply ends and no marker has come. Until
      then the text from there on is held back, because the model may only have quoted it.
    """

    def __init__(self, patterns: TagPatterns, value: ValueOf) -> None:
        self._value = value
        self._marker = compiled(value.marker)
        self._tail = compiled(patterns.tail)
        self._follow = compiled(rf"\s{{0,64}}(?:{patterns.key}|{patterns.end})")
        marker = f"(?P<marker>{value.marker})"
        self._tokens = compiled(marker if value.is_wrapped else rf"{marker}|{_other_ends(patterns)}")
        self._place = self._depth = self._quoted_calls = 0
        self._quoted: int | None = None
        self.is_blank = True
        """The text of the value is only white space so far."""
        self.was_forgotten = False
        """The value ended before another argument, without its marker."""
        self.has_ended = False
        """The value ends at its marker, although nothing follows it."""

    def find(self, buffer: str) -> tuple[int, int | None]:
        """Return the end of the certain text, and the index after the value's end if it has been found."""
        if len(buffer) <= _SHORT and _FIRST.isdisjoint(buffer):
            return self._passed(buffer)
        while token := self._tokens.search(buffer, self._place, partial=True):
            self._pass(buffer, token.start())
            ended = None if token.partial else self._ended(buffer, token)
            if ended is not None:
                return ended
            if token.partial or self._place == token.start():
                return self._certain(token.start()), None
        return self._passed(buffer)

    def forget(self, length: int) -> None:
        """Adjust to a buffer that has lost text at its front."""
        self._place -= length
        self._quoted = None if self._quoted is None else self._quoted - length

    def held(self, buffer: str) -> str:
        """Return the text that may be quoted, up to the last tag that is not whole."""
        return buffer[: self._place] if self._quoted is not None else ""

    def last(self, buffer: str) -> tuple[int, int]:
        """Return where the value ends because the reply did, and where the text after it begins."""
        if self._quoted is not None:
            return self._quoted, self._quoted
        self.has_ended = bool(self._marker.match(buffer, self._place))
        least = 1 if self._value.is_wrapped else _LEAST_MARKUP
        is_markup = len(buffer[self._place :].strip()) >= least
        return self._place if is_markup else len(buffer), len(buffer)

    def _passed(self, buffer: str) -> tuple[int, None]:
        self._pass(buffer, len(buffer))
        return self._certain(len(buffer)), None

    def _certain(self, end: int) -> int:
        return end if self._quoted is None else self._quoted

    def _pass(self, buffer: str, end: int) -> None:
        passed = buffer[self._place : end]
        self._depth += self._value.levels(passed)
        self.is_blank = self.is_blank and (self._quoted is not None or not passed.strip())
        self._place = end

    def _ended(self, buffer: str, token: regex.Match[str]) -> tuple[int, int | None] | None:
        """Return the value's end if it is at this token. Else pass the token, unless more text decides."""
        if token["marker"]:
            return self._ended_at_marker(buffer, token)
        if token["again"]:
            if self._value.is_offered(token["tool"]):
                self._quoted_calls += token["key"] is not None
                self._quote(token.start())
        elif token["due"]:
            if self._may_end and self._value.is_due(token["key"]):
                self.was_forgotten = True
                return token.start(), token.start("due")
        elif token["end"]:
            self._quote(token.start())
        elif self._tail.fullmatch(buffer, token.start(), partial=True):
            return None
        self._pass(buffer, token.end())
        return None

    @property
    def _may_end(self) -> bool:
        return self._quoted is None and self._depth <= 0 and not self.is_blank

    def _quote(self, start: int) -> None:
        self._quoted = start if self._quoted is None else self._quoted

    def _ended_at_marker(self, buffer: str, token: regex.Match[str]) -> tuple[int, int] | None:
        follow = self._follow.match(buffer, token.end(), partial=True)
        if follow is not None and self._depth <= 0:
            if follow.partial:
                return None
            if not self._quoted_calls:
                return token.span()
            self._quoted_calls -= follow["key"] is None
        elif self._value.is_wrapped:
            return token.span()
        self._pass(buffer, token.end())
        return None


def _other_ends(patterns: TagPatterns) -> str:
    """Return the pattern of the tags that may end a value without its marker."""
    line, space = (_LINE, _LINE) if patterns.has_lines else ("", f"(?:{_LINE})?")
    again, due, end = (
        rf"(?P<again>{patterns.call})",
        rf"(?P<due>{patterns.key})",
        rf"(?P<end>{patterns.end})",
    )
    return rf"{space}{again}|{line}(?:{due}|{end})|(?P<late>{patterns.end})"
