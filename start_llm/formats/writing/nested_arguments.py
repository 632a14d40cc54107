"""Writes arguments as nested elements, and their grammar."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.nested import ITEM
from start_llm.formats.reading.schema import Shape, enum_values, flatten_arguments, parts_of
from start_llm.formats.writing.arguments import with_definitions
from start_llm.formats.writing.call_text import Arguments
from start_llm.formats.writing.callable_tool import CallableTool
from start_llm.formats.writing.lark import Lark

_NAME = regex.compile(r"(?!invoke\s)[^<>/\n][^<>\n]{0,255}")
_DEEPEST = 8
_MAX_ITEMS = 64


@dataclass(frozen=True, slots=True)
class NestedArguments:
    """Writes each argument, and each part of an array or object, as an element.

    Attributes:
        mark: text before every tag; it does not occur in texts.
    """

    mark: str

    def write(self, arguments: Arguments) -> str:
        return "".join(self.element(name, self.text(value)) for name, value in arguments.items())

    def element(self, name: str, text: str) -> str:
        return f"{self.opening(name)}{text}{self.closing(name)}"

    def opening(self, name: str) -> str:
        return f"{self.mark}<{name}>"

    def closing(self, name: str) -> str:
        return f"{self.mark}</{name}>"

    def text(self, value: Json) -> str:
        """Write a text unchanged, an array or object as its parts, and any other value as JSON."""
        match value:
            case str():
                return value
            case list():
                return "".join(self.element(ITEM, self.text(item)) for item in value)
            case dict():
                return self.write(value)
            case _:
                return written(value)

    def expression(self, lark: Lark, tool: CallableTool) -> str:
        """Enforce types, `enum`, `const`, `items`, `properties`, `required` and number bounds.

        A value that the schema leaves open may be JSON or any text.
        """
        return _NestedGrammar(lark, self, tool).arguments()


class _NestedGrammar:
    def __init__(self, lark: Lark, form: NestedArguments, tool: CallableTool) -> None:
        self._lark = lark
        self._form = form
        self._tool = tool
        self._root = tool.parameters
        self._known: dict[tuple[str, str, int], str] = {}

    def arguments(self) -> str:
        flattened = replace(self._tool, parameters=flatten_arguments(self._root))
        return self._members(flattened, _DEEPEST) or '""'

    def _members(self, whole: CallableTool, depth: int) -> str:
        return " ".join(self._all_members(whole, depth))

    def _all_members(self, whole: CallableTool, depth: int) -> Iterator[str]:
        """Yield the members in the schema's order. Optional members may be left out."""
        shape = Shape(dict(whole.parameters), self._root)
        for name in dict.fromkeys([*whole.properties, *whole.required]):
            if not _NAME.fullmatch(name):
                if name in whole.required:
                    raise self._tool.has_no_form_for(name)
                continue
            element = self._element(name, shape.member(name), depth)
            yield element if name in whole.required else f"({element})?"

    def _element(self, name: str, shape: Shape, depth: int) -> str:
        opening, closing = self._form.opening(name), self._form.closing(name)
        return f"{self._lark.literal(opening)} {self._lark.either(*self._ways(shape, closing, depth))}"

    def _ways(self, shape: Shape, closing: str, depth: int) -> Iterator[str]:
        """Yield the possible values, each with the closing tag."""
        if self._tool.grammar:
            yield self._lark.text_until(self._tool.grammar, closing)
            return
        if values := enum_values(shape.schema, self._root):
            for value in values:
                yield self._lark.literal(self._form.text(value) + closing)
            return
        types = shape.types
        if not types or "string" in types:
            yield self._lark.until(closing)
        end = self._lark.literal(closing)
        nested = types & {"array", "object"}
        if leaves := types - nested - {"string"}:
            yield f"{self._json(shape, leaves)} {end}"
        for kind in sorted(nested):
            parts = self._parts(kind, shape, depth)
            yield f"{parts or self._json(shape, frozenset({kind}))} {end}"

    def _parts(self, kind: str, shape: Shape, depth: int) -> str:
        """Return the elements of an array or an object; an empty string if its schema names none.

        There are more ways through references than can be written out: each schema is, once per level.
        """
        if not depth:
            return ""
        key = (kind, json.dumps(shape.schema), depth)
        if key not in self._known:
            self._known[key] = self._written_out(kind, shape, depth)
        return self._known[key]

    def _written_out(self, kind: str, shape: Shape, depth: int) -> str:
        if kind == "array":
            item = self._lark.rule(self._element(ITEM, shape.items, depth - 1))
            return f"{item}{{0,{_MAX_ITEMS}}}" if isinstance(shape.items.schema, dict) else ""
        schema = shape.schema if isinstance(shape.schema, dict) else {}
        return self._members(replace(self._tool, parameters=flatten_arguments(schema, self._root)), depth - 1)

    def _json(self, shape: Shape, types: frozenset[str]) -> str:
        schema: Mapping[str, Json] = shape.schema if isinstance(shape.schema, dict) else {}
        limit: Json = {"type": [*sorted(types)]}
        whole = with_definitions(schema, self._root)
        limited = {**whole, "allOf": [*parts_of(whole, "allOf"), limit]}
        return self._lark.schema(limited, self._tool.origin, lenient=True)
