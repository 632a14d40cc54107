"""Gemma 4's notation of arguments: `{key:<|"|>text<|"|>,number:1,list:[true,null]}`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import regex

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.output.grammar.arguments import Offered
from start_llm.output.grammar.lark import Lark
from start_llm.output.tool_calls.schema import COMPOSING, constants, flat, parts_of, resolve

_QUOTE = '<|"|>'
_KEY = r"[^\s:,{}\[\]<>\"]{1,64}"
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


def gemma_arguments(lark: Lark, tool: Offered) -> str:
    """Types, `enum`, `const`, `items`, `properties`, `required` hold, and bounds of numbers; nothing else."""
    return _Notation(lark, tool).arguments()


class _Notation:
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
        member = self._lark.rule(f'{self._lark.pattern(_KEY)} ":" {self._any()}')
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
    return name if regex.fullmatch(_KEY, name) else f"{_QUOTE}{name}{_QUOTE}"


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
            return json.dumps(value)
