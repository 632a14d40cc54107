"""Writes arguments in Gemma's notation, and their grammar."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.schema import COMPOSING, enum_values, flatten_arguments, parts_of, resolve
from start_llm.formats.writing.call_text import Arguments
from start_llm.formats.writing.callable_tool import CallableTool
from start_llm.formats.writing.lark import Lark, separated

_COMMA = '","'
_PLAIN_KEY = r"[^\s:,{}\[\]<>\"]{1,64}"
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_DEEPEST = 8
_MAX_ITEMS = 64
_SAYING = COMPOSING | {"type"}
_LITERALS: Mapping[str, str] = {
    "integer": r"-?(0|[1-9][0-9]{0,15})",
    "number": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?",
    "boolean": "true|false",
    "null": "null",
}


@dataclass(frozen=True, slots=True)
class GemmaArguments:
    """Writes the arguments as an object in Gemma's notation.

    Attributes:
        quote: the mark on both sides of a text.
    """

    quote: str

    def write(self, arguments: Arguments) -> str:
        return _written(self.quote, dict(arguments))

    def expression(self, lark: Lark, tool: CallableTool) -> str:
        """Enforce only types, `enum`, `const`, `items`, `properties`, `required` and number bounds."""
        return _GemmaGrammar(lark, self.quote, tool).arguments()


class _GemmaGrammar:
    def __init__(self, lark: Lark, quote: str, tool: CallableTool) -> None:
        self._lark = lark
        self._quote = quote
        self._root = tool.parameters
        self._tool = replace(tool, parameters=flatten_arguments(tool.parameters))
        self._anything = ""
        self._referred: dict[tuple[str, int], str] = {}

    def arguments(self) -> str:
        if self._tool.properties or self._tool.required:
            return self._object(self._tool, _DEEPEST)
        return self._free_object() if self._tool.takes_others else '"{}"'

    def _value(self, schema: Json, depth: int) -> str:
        if not isinstance(schema, dict) or depth == 0:
            return self._any()
        if values := enum_values(schema, self._root):
            return self._lark.either(*(self._lark.literal(_written(self._quote, value)) for value in values))
        if isinstance(reference := schema.get("$ref"), str):
            return self._definition(reference, depth)
        if "allOf" in schema:
            return self._all_of(schema, depth)
        ways = list(self._ways(schema, depth))
        return self._lark.either(*ways) if ways else self._any()

    def _definition(self, reference: str, depth: int) -> str:
        """Return the value that a reference leads to. Each is written out once per level."""
        key = (reference, depth)
        if key not in self._referred:
            self._referred[key] = self._value(resolve(reference, self._root), depth - 1)
        return self._referred[key]

    def _ways(self, schema: Mapping[str, Json], depth: int) -> Iterator[str]:
        stated = schema.get("type")
        for kind in stated if isinstance(stated, list) else [stated]:
            if isinstance(kind, str):
                yield self._of_type(kind, schema, depth)
        if stated is None:
            for word in ("anyOf", "oneOf"):
                yield from (self._value(part, depth - 1) for part in parts_of(schema, word))

    def _all_of(self, schema: Mapping[str, Json], depth: int) -> str:
        """Return the object of all parts' members, else the first part that has a type or further parts."""
        merged = flatten_arguments(schema, self._root)
        if merged.get("properties"):
            return self._object(replace(self._tool, parameters=merged), depth)
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
                return self._object(replace(self._tool, parameters=schema), depth)
            case "integer" | "number" if not _BOUNDS.isdisjoint(schema):
                return self._lark.schema({**schema, "type": kind}, self._tool.origin, lenient=True)
            case _:
                return self._lark.pattern(_LITERALS[kind]) if kind in _LITERALS else self._any()

    def _text(self) -> str:
        if self._tool.grammar:
            text = self._lark.text_until(self._tool.grammar, self._quote)
            return f"{self._lark.literal(self._quote)} {text}"
        return f"{self._lark.literal(self._quote)} {self._lark.until(self._quote)}"

    def _array(self, item: str) -> str:
        item = self._lark.rule(item)
        return f'"[" ({item} ("," {item}){{0,{_MAX_ITEMS}}})? "]"'

    def _object(self, whole: CallableTool, depth: int) -> str:
        names = dict.fromkeys([*whole.properties, *whole.required])
        if not names:
            return self._free_object()
        members = {name: self._member(name, whole.properties.get(name), depth) for name in names}
        between = separated(self._lark, members, whole.required, _COMMA)
        return f'"{{" {between} "}}"'

    def _member(self, name: str, schema: Json, depth: int) -> str:
        if self._quote in name:
            raise self._tool.has_no_form_for(name)
        key = self._lark.literal(_key(self._quote, name))
        return self._lark.rule(f'{key} ":" {self._value(schema, depth - 1)}')

    def _free_object(self) -> str:
        member = self._lark.rule(f'{self._lark.pattern(_PLAIN_KEY)} ":" {self._any()}')
        return f'"{{" ({member} ("," {member}){{0,{_MAX_ITEMS}}})? "}}"'

    def _any(self) -> str:
        """Return a grammar for any value of the notation."""
        if not self._anything:
            self._anything = self._lark.name()
            literals = [
                self._lark.pattern(literal) for kind, literal in _LITERALS.items() if kind != "integer"
            ]
            ways = [self._text(), *literals, self._array(self._anything), self._free_object()]
            self._lark.define(self._anything, " | ".join(ways))
        return self._anything


def _key(quote: str, name: str) -> str:
    return name if regex.fullmatch(_PLAIN_KEY, name) else f"{quote}{name}{quote}"


def _written(quote: str, value: Json) -> str:
    """Return a value in the model's notation."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            members = (f"{_key(quote, name)}:{_written(quote, member)}" for name, member in value.items())
            return f"{{{','.join(members)}}}"
        case list():
            return f"[{','.join(_written(quote, item) for item in value)}]"
        case _:
            return written(value)
