"""Parses objects in Gemma's notation, `{key:<|"|>text<|"|>,number:1}`, with a configurable quote."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import NamedTuple

import regex

from start_llm.core.chat import Json
from start_llm.core.markers import longest_beginning
from start_llm.formats.reading.cursor import Cursor
from start_llm.formats.reading.json_calls import STEPS, Objects, depth_after
from start_llm.formats.reading.json_text import parsed, written

_LITERAL = regex.compile(r"\s*(\"(?:[^\"\\]|\\.)*+\"|[^\s,{}\[\]<>]+)")
_WORDS = regex.compile(r"\s*(?!NaN\b|Infinity\b)([^\W\d_][^,{}\[\]<>:\"]*+)(?=[,}\]])")
_CONSTANTS: Mapping[str, Json] = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
}  # fmt: skip


class _Patterns(NamedTuple):
    """Patterns of a member's name with its colon, and of a text."""

    key: regex.Pattern[str]
    text: regex.Pattern[str]


@cache
def _patterns(quote: str) -> _Patterns:
    mark = regex.escape(quote)
    word = r"[^\s:,{}\[\]<>\"]++"
    key = rf"\s*({word}(?:\s++{word})*+|\"[^\"\\]++\"|{mark}.*?{mark})\s*:"
    text = rf"\s*{mark}(.*?){mark}"
    return _Patterns(regex.compile(key, regex.DOTALL), regex.compile(text, regex.DOTALL))


class LiteralScanner:
    """Finds the end of an object in Gemma's notation."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._structure = regex.compile(rf"{regex.escape(quote)}|[{{}}\[\]]")
        self._held = ""
        self._length = 0
        self._depth = 0
        self._in_text = False

    def feed(self, text: str) -> int | None:
        buffer = self._held + text
        keep = longest_beginning(buffer, (self._quote,))
        ready, self._held = buffer[: len(buffer) - keep], buffer[len(buffer) - keep :]
        parts = ready.split(self._quote)
        depth = depth_after(" ".join(parts[self._in_text :: 2]), self._depth)
        if not depth:
            return self._length + self._end(ready)
        self._depth = depth
        self._in_text ^= len(parts) % 2 == 0
        self._length += len(ready)
        return None

    def _end(self, text: str) -> int:
        """Return the end of the object. It must lie in this text."""
        tokens = self._structure.finditer(text)
        return next(token.end() for token in tokens if not self._depth_at(token[0]))

    def _depth_at(self, mark: str) -> int:
        if mark == self._quote:
            self._in_text = not self._in_text
        elif not self._in_text:
            self._depth += STEPS[mark]
        return self._depth


def as_json(quote: str, text: str) -> str:
    """Convert an object in Gemma's notation to JSON.

    Raises:
        ValueError: the text is not such an object.
    """
    cursor = GemmaValues(text, quote)
    value = cursor.value()
    if not isinstance(value, dict) or cursor.rest.strip():
        raise ValueError("the arguments are no object")
    return written(value)


class GemmaValues(Cursor):
    """Takes values in Gemma's notation from the front of a text."""

    def __init__(self, text: str, quote: str) -> None:
        super().__init__(text)
        self._quote = quote
        self._patterns = _patterns(quote)

    def value(self) -> Json:
        if self.takes("{"):
            return dict(self.items("}", self._member))
        if self.takes("["):
            return self.items("]", self.value)
        if quoted := self.take(self._patterns.text):
            return quoted[1]
        if words := self.take(_WORDS):  # a text without quotes, which small models forget
            said = words[1].rstrip()
            return _CONSTANTS.get(said, said)
        literal = self.take(_LITERAL)
        if literal is None:
            raise ValueError("a value is missing")
        # Templates write what is null as Python does.
        return None if literal[1] == "None" else parsed(literal[1])

    def _member(self) -> tuple[str, Json]:
        return self._key(), self.value()

    def _key(self) -> str:
        key = self.take(self._patterns.key)
        if key is None:
            raise ValueError("a member has no name")
        return key[1].replace(self._quote, "").strip('"')


def gemma_calls(quote: str, mark: str) -> Objects:
    """Return the patterns for one or more `call:NAME{…}` and the mark that ends them."""
    call = r"call:(?P<name>[\w.\-]{1,256})\s{0,64}(?=\{)"
    return Objects(
        head=rf"\s{{0,64}}:?{call}",
        next_call=rf"\s{{0,64}}(?={call})",
        block_end=r"\s{0,64}" + regex.escape(mark),
        span=partial(LiteralScanner, quote),
        arguments=partial(as_json, quote),
    )
