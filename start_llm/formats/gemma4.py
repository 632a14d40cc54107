"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,number:1}<tool_call|>`.

Ours: mlx_lm's parser does not find braces in texts that are cut, loses good calls before a bad one, and takes
tools that were not offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import regex

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.markers import longest_beginning
from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import STEPS, ObjectReader, Objects, depth_behind
from start_llm.formats.reading.json_text import parsed, written
from start_llm.formats.reading.schema import COMPOSING, constants, flat, parts_of, resolve
from start_llm.formats.thoughts import GEMMA
from start_llm.formats.writing.call_text import Arguments, CallText
from start_llm.formats.writing.lark import Lark
from start_llm.formats.writing.offered import Offered

_QUOTE = '<|"|>'
_STRUCTURE = regex.compile(r'<\|"\|>|[{}\[\]]')
_KEY = regex.compile(r"\s*([^\s:,{}\[\]<>\"]+|<\|\"\|>.*?<\|\"\|>)\s*:", regex.DOTALL)
_LITERAL = regex.compile(r"\s*([^\s,{}\[\]<>]+)")
_TEXT = regex.compile(r'\s*<\|"\|>(.*?)<\|"\|>', regex.DOTALL)

_PLAIN_KEY = r"[^\s:,{}\[\]<>\"]{1,64}"
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_DEEPEST = 8
_MOST_ITEMS = 64
_SAYING = COMPOSING | {"type"}
_LITERALS: Mapping[str, str] = {
    "integer": r"-?(0|[1-9][0-9]{0,15})",
    "number": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?",
    "boolean": "true|false",
    "null": "null",
}


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


class GemmaArguments:
    """An object in Gemma's notation."""

    def write(self, arguments: Arguments) -> str:
        return _written(dict(arguments))

    def expression(self, lark: Lark, tool: Offered) -> str:
        """Types, `enum`, `const`, `items`, `properties`, `required` hold, and bounds of numbers; no more."""
        return _Grammar(lark, tool).arguments()


class _Grammar:
    def __init__(self, lark: Lark, tool: Offered) -> None:
        self._lark = lark
        self._root = tool.parameters
        self._tool = replace(tool, parameters=flat(tool.parameters))
        self._anything = ""

    def arguments(self) -> str:
        if self._tool.properties:
            return self._object(self._tool.parameters, _DEEPEST)
        is_open = self._tool.parameters.get("additionalProperties") not in (None, False)
        return self._free_object() if is_open else '"{}"'

    def _value(self, schema: Json, depth: int) -> str:
        if not isinstance(schema, dict) or depth == 0:
            return self._any()
        if values := constants(schema, self._root):
            return self._lark.either(*(self._lark.literal(_written(value)) for value in values))
        if isinstance(reference := schema.get("$ref"), str):
            return self._value(resolve(reference, self._root), depth - 1)
        if "allOf" in schema:
            return self._all_of(schema, depth)
        ways = list(self._ways(schema, depth))
        return self._lark.either(*ways) if ways else self._any()

    def _ways(self, schema: Mapping[str, Json], depth: int) -> Iterator[str]:
        stated = schema.get("type")
        for kind in stated if isinstance(stated, list) else [stated]:
            if isinstance(kind, str):
                yield self._of_type(kind, schema, depth)
        if stated is None:
            for word in ("anyOf", "oneOf"):
                yield from (self._value(part, depth - 1) for part in parts_of(schema, word))

    def _all_of(self, schema: Mapping[str, Json], depth: int) -> str:
        """An object of all members of its parts; else the first part that says what it is."""
        merged = flat(schema, self._root)
        if merged.get("properties"):
            return self._object(merged, depth)
        own = {word: value for word, value in schema.items() if word != "allOf"}
        parts = [own, *parts_of(schema, "allOf")]
        saying = (part for part in parts if isinstance(part, dict) and not _SAYING.isdisjoint(part))
        return self._value(next(saying, None), depth - 1)

    def _of_type(self, kind: str, schema: Mapping[str, Json], depth: int) -> str:
        match kind:
            case "string":
                return self._text()
            case "array":
                return self._array(self._value(schema.get("items"), depth - 1))
            case "object":
                return self._object(schema, depth)
            case "integer" | "number" if not _BOUNDS.isdisjoint(schema):
                return self._lark.schema({**schema, "type": kind}, self._tool.origin, lenient=True)
            case _:
                return self._lark.pattern(_LITERALS[kind]) if kind in _LITERALS else self._any()

    def _text(self) -> str:
        return f"{self._lark.literal(_QUOTE)} {self._lark.until(_QUOTE)}"

    def _array(self, item: str) -> str:
        item = self._lark.rule(item)
        return f'"[" ({item} ("," {item}){{0,{_MOST_ITEMS}}})? "]"'

    def _object(self, schema: Mapping[str, Json], depth: int) -> str:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not properties:
            return self._free_object()
        members = {name: self._member(name, one, depth) for name, one in properties.items()}
        return f'"{{" {self._members(members, required if isinstance(required, list) else [])} "}}"'

    def _members(self, members: Mapping[str, str], required: Sequence[Json]) -> str:
        """In the schema's order: a way for each member that may be the first, and one without any."""
        ways: list[str] = []
        behind, is_open = "", True
        for name, member in reversed(list(members.items())):
            if name in required:
                ways, is_open = [], False
            ways.append(f"{member} {behind}".strip())
            next_one = f'("," {member}){"" if name in required else "?"}'
            behind = self._lark.rule(f"{next_one} {behind}".strip())
        first = self._lark.either(*reversed(ways))
        return f"({first})?" if is_open else first

    def _member(self, name: str, schema: Json, depth: int) -> str:
        if _QUOTE in name:
            raise InvalidRequest(
                f"'tools': {name!r} of {self._tool.name!r} has no form in this model's calls.", param="tools"
            )
        key = self._lark.literal(_key(name))
        return self._lark.rule(f'{key} ":" {self._value(schema, depth - 1)}')

    def _free_object(self) -> str:
        member = self._lark.rule(f'{self._lark.pattern(_PLAIN_KEY)} ":" {self._any()}')
        return f'"{{" ({member} ("," {member}){{0,{_MOST_ITEMS}}})? "}}"'

    def _any(self) -> str:
        """Whatever the notation can say."""
        if not self._anything:
            self._anything = self._lark.name()
            literals = [self._lark.pattern(one) for kind, one in _LITERALS.items() if kind != "integer"]
            ways = [self._text(), *literals, self._array(self._anything), self._free_object()]
            self._lark.define(self._anything, " | ".join(ways))
        return self._anything


def _key(name: str) -> str:
    return name if regex.fullmatch(_PLAIN_KEY, name) else f"{_QUOTE}{name}{_QUOTE}"


def _written(value: Json) -> str:
    """A value as the model writes it."""
    match value:
        case str():
            return f"{_QUOTE}{value}{_QUOTE}"
        case dict():
            members = (f"{_key(name)}:{_written(one)}" for name, one in value.items())
            return f"{{{','.join(members)}}}"
        case list():
            return f"[{','.join(map(_written, value))}]"
        case _:
            return written(value)


_OBJECTS = Objects(
    head=r"\s{0,64}call:(?P<name>[\w.\-]{1,256})\s{0,64}(?=\{)",
    block_end=r"\s{0,64}<tool_call\|>",
    span=LiteralSpan,
    arguments=as_json,
)
GEMMA4 = ModelFormat(
    name="gemma4",
    marks=("<|channel>", "<|tool_call>"),
    types=("gemma4",),
    thought=GEMMA,
    notations=(
        Notation(
            name="gemma4",
            openers=("<|tool_call>",),
            reader=partial(ObjectReader, _OBJECTS),
            text=CallText(
                mark="<|tool_call>",
                head="<|tool_call>call:NAME",
                tail="<tool_call|>",
                arguments=GemmaArguments(),
            ),
        ),
    ),
)
