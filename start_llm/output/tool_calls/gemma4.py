"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,number:1}<tool_call|>`.

Ours: mlx_lm's parser does not find braces in texts that are cut, loses good calls before a bad one, and takes
tools that were not offered.
"""

from __future__ import annotations

from functools import partial

import regex

from start_llm.core.chat import Json
from start_llm.core.markers import longest_beginning
from start_llm.output.tool_calls.base import Format
from start_llm.output.tool_calls.json_calls import STEPS, ObjectReader, Objects, depth_behind
from start_llm.output.tool_calls.json_text import parsed, written

_QUOTE = '<|"|>'
_STRUCTURE = regex.compile(r'<\|"\|>|[{}\[\]]')
_KEY = regex.compile(r"\s*([^\s:,{}\[\]<>\"]+|<\|\"\|>.*?<\|\"\|>)\s*:", regex.DOTALL)
_LITERAL = regex.compile(r"\s*([^\s,{}\[\]<>]+)")
_TEXT = regex.compile(r'\s*<\|"\|>(.*?)<\|"\|>', regex.DOTALL)


class LiteralSpan:
    """The end of an object in Gemma's notation."""

    def __init__(self) -> None:
        self._held = ""
        self._length = 0
        self._depth = 0
        self._in_text = False

    def feed(self, text: str) -> int | None:
        buffer = self._held + text
        keep = longest_beginning(buffer, (_QUOTE,))
        ready, self._held = buffer[: len(buffer) - keep], buffer[len(buffer) - keep :]
        parts = ready.split(_QUOTE)
        depth = depth_behind(" ".join(parts[self._in_text :: 2]), self._depth)
        if not depth:
            return self._length + self._end(ready)
        self._depth = depth
        self._in_text ^= len(parts) % 2 == 0
        self._length += len(ready)
        return None

    def _end(self, text: str) -> int:
        """The end of the object, which is in this text."""
        tokens = _STRUCTURE.finditer(text)
        return next(token.end() for token in tokens if not self._depth_at(token[0]))

    def _depth_at(self, mark: str) -> int:
        if mark == _QUOTE:
            self._in_text = not self._in_text
        elif not self._in_text:
            self._depth += STEPS[mark]
        return self._depth


def as_json(text: str) -> str:
    """JSON of an object in Gemma's notation. ValueError if it is none."""
    value, end = _value(text, 0)
    if not isinstance(value, dict) or text[end:].strip():
        raise ValueError("the arguments are no object")
    return written(value)


def _value(text: str, place: int) -> tuple[Json, int]:
    place = _behind_space(text, place)
    match text[place : place + 1]:
        case "{":
            return _object(text, place + 1)
        case "[":
            return _array(text, place + 1)
        case _:
            return _scalar(text, place)


def _object(text: str, place: int) -> tuple[Json, int]:
    members: dict[str, Json] = {}
    while not _ends(text, place, "}"):
        key = _KEY.match(text, place)
        if key is None:
            raise ValueError("a member has no name")
        value, place = _value(text, key.end())
        members[key[1].replace(_QUOTE, "")] = value
        place = _behind_comma(text, place, "}")
    return members, _behind_space(text, place) + 1


def _array(text: str, place: int) -> tuple[Json, int]:
    items: list[Json] = []
    while not _ends(text, place, "]"):
        value, place = _value(text, place)
        items.append(value)
        place = _behind_comma(text, place, "]")
    return items, _behind_space(text, place) + 1


def _scalar(text: str, place: int) -> tuple[Json, int]:
    quoted = _TEXT.match(text, place)
    if quoted:
        return quoted[1], quoted.end()
    literal = _LITERAL.match(text, place)
    if literal is None:
        raise ValueError("a value is missing")
    return parsed(literal[1]), literal.end()


def _ends(text: str, place: int, mark: str) -> bool:
    place = _behind_space(text, place)
    return text[place : place + 1] in (mark, "")


def _behind_comma(text: str, place: int, mark: str) -> int:
    place = _behind_space(text, place)
    if text[place : place + 1] == ",":
        return place + 1
    if text[place : place + 1] != mark:
        raise ValueError("members are not separated")
    return place


def _behind_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


_OBJECTS = Objects(
    head=r"\s{0,64}call:(?P<name>[\w.\-]{1,256})\s{0,64}(?=\{)",
    block_end=r"\s{0,64}<tool_call\|>",
    span=LiteralSpan,
    arguments=as_json,
)
GEMMA4 = Format("gemma4", ("<|tool_call>",), partial(ObjectReader, _OBJECTS))
