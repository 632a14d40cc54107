"""The arguments of a call as elements that hold elements, and a grammar of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.nested import ITEM
from start_llm.formats.reading.schema import Shape, constants, flat, parts_of
from start_llm.formats.writing.arguments import alone
from start_llm.formats.writing.call_text import Arguments
from start_llm.formats.writing.lark import Lark
from start_llm.formats.writing.offered import Offered

_NAME = regex.compile(r"(?!invoke\s)[^<>/\n][^<>\n]{0,255}")
_DEEPEST = 8
_MOST_ITEMS = 64


@dataclass(frozen=True, slots=True)
class NestedArguments:
    """Each argument is an element, and so is each part of an array or an object.

    Attributes:
        mark: in front of every tag; texts do not have it.
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
        """A text as it is, an array or an object as its parts, everything else as JSON."""
        match value:
            case str():
                return value
            case list():
                return "".join(self.element(ITEM, self.text(item)) for item in value)
            case dict():
                return self.write(value)
            case _:
                return written(value)

    def expression(self, lark: Lark, tool: Offered) -> str:
        """Types, `enum`, `const`, `items`, `properties`, `required` hold, and bounds of numbers.

        What a schema leaves open is JSON, or any text.
        """
        return _Grammar(lark, self, tool).arguments()


class _Grammar:
    def __init__(self, lark: Lark, form: NestedArguments, tool: Offered) -> None:
        self._lark = lark
        self._form = form
        self._tool = tool
        self._root = tool.parameters

    def arguments(self) -> str:
        flattened = replace(self._tool, parameters=flat(self._root))
        return self._members(flattened, _DEEPEST) or '""'

    def _members(self, whole: Offered, depth: int) -> str:
        return " ".join(self._all_members(whole, depth))

    def _all_members(self, whole: Offered, depth: int) -> Iterator[str]:
        """In the schema's order; those that are not required if the model wants them."""
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
        """The values that there may be, each with what ends it."""
        if values := constants(shape.schema, self._root):
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
        """The elements of an array or an object; nothing if its schema names none."""
        if not depth:
            return ""
        if kind == "array":
            item = self._lark.rule(self._element(ITEM, shape.items, depth - 1))
            return f"{item}{{0,{_MOST_ITEMS}}}" if isinstance(shape.items.schema, dict) else ""
        schema = shape.schema if isinstance(shape.schema, dict) else {}
        return self._members(replace(self._tool, parameters=flat(schema, self._root)), depth - 1)

    def _json(self, shape: Shape, types: frozenset[str]) -> str:
        schema: Mapping[str, Json] = shape.schema if isinstance(shape.schema, dict) else {}
        limit: Json = {"type": [*sorted(types)]}
        whole = alone(schema, self._root)
        limited = {**whole, "allOf": [*parts_of(whole, "allOf"), limit]}
        return self._lark.schema(limited, self._tool.origin, lenient=True)
