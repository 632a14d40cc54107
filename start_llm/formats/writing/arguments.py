"""Writes arguments, and their grammar, in formats that put each argument between tags."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import regex

from start_llm.core.chat import Json, TextGrammar
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.schema import (
    JSON_TYPES,
    TEXT,
    Tools,
    enum_values,
    flatten_arguments,
    parts_of,
    types_of,
)
from start_llm.formats.writing.call_text import Arguments
from start_llm.formats.writing.callable_tool import CallableTool
from start_llm.formats.writing.lark import Lark

_KEY = regex.compile(r"[^<>\"'\n]{1,256}")
_MAX_UNNAMED = 8
_MARKUP = frozenset("<&\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """Writes each argument between tags.

    Attributes:
        key: text before the value, with `KEY` for the name and `TYPE` for the type's name in this format.
        padding: text between a tag and the value.
        value_end: text after the value; it cannot occur in a value.
        after: text after `value_end`.
        wrapper: texts that may surround a text value.
        types: the format's name of each JSON type, if keys state types.
        escape: converts a name to its form in `key`.
    """

    key: str
    value_end: str
    after: str = ""
    padding: str = ""
    wrapper: tuple[str, str] | None = None
    types: Mapping[str, str] = field(default_factory=dict[str, str])
    escape: Callable[[str], str] = str

    def write(self, arguments: Arguments) -> str:
        """Write texts unchanged, wrapped if they contain markup, and all other values as JSON."""
        return "".join(
            f"{self.opening(name, self.word(value))}{self.padding}{self._wrapped(_text(value))}"
            f"{self.padding}{self.value_end}{self.after}"
            for name, value in arguments.items()
        )

    def opening(self, name: str, word: str) -> str:
        """Return the text before a value."""
        return self.key.replace("TYPE", word).replace("KEY", self.escape(name))

    def word(self, value: Json) -> str:
        """Return the format's name of this value's type."""
        return next((self.types[kind] for kind in types_of(value) if kind in self.types), "")

    def _wrapped(self, text: str) -> str:
        if self.wrapper is None or _MARKUP.isdisjoint(text):
            return text
        return text.join(self.wrapper)

    def expression(self, lark: Lark, tool: CallableTool) -> str:
        return _TaggedGrammar(lark, self, tool).expression()


class _TaggedGrammar:
    """Builds the grammar of one tool's arguments. Optional arguments may be left out.

    The grammar enforces the type and the `enum` of an argument, and its whole schema where the value is JSON.
    It does not enforce the pattern or length of a text.
    """

    def __init__(self, lark: Lark, tags: TaggedArguments, tool: CallableTool) -> None:
        self._lark = lark
        self._tags = tags
        self._root = tool.parameters
        self._tool = replace(tool, parameters=flatten_arguments(tool.parameters))
        self._tools = Tools([tool.definition])

    def expression(self) -> str:
        return " ".join(self._arguments()) or '""'

    def _arguments(self) -> Iterator[str]:
        required = self._tool.required
        names = dict.fromkeys([*self._tool.properties, *required])
        for name in names:
            if not _KEY.fullmatch(name):
                if name in required:
                    raise self._tool.has_no_form_for(name)
                continue
            argument = self._argument(name, partial(self._opening, name))
            yield argument if name in required else f"({argument})?"
        if not names and self._tool.takes_others:
            yield f"({self._argument('', self._unnamed)}){{0,{_MAX_UNNAMED}}}"

    def _opening(self, name: str, word: str) -> str:
        return self._lark.literal(self._tags.opening(name, word))

    def _unnamed(self, word: str) -> str:
        before, after = self._tags.key.replace("TYPE", word).split("KEY")
        name = self._lark.pattern(r"[^<>&\"'\n]{1,64}")
        return f"{self._lark.literal(before)} {name} {self._lark.literal(after)}"

    def _argument(self, name: str, opening: Callable[[str], str]) -> str:
        """Return the alternatives for the key, the value and the text that ends it."""
        padding, after = self._lark.literal(self._tags.padding), self._lark.literal(self._tags.after)
        ways = ([opening(word), padding, value, after] for word, value in self._values(name))
        return self._lark.either(*(" ".join(filter(None, way)) for way in ways))

    def _values(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield pairs of a type's name in the key and the value with its end."""
        types = self._tools.types(self._tool.name, name)
        schema = self._tool.schema_of(name)
        values = enum_values(schema, self._root)
        if self._tool.grammar:
            yield self._tags.types.get("string", ""), self._text_of(self._tool.grammar)
        elif values and "string" in types:
            for word, group in groupby(sorted(values, key=self._tags.word), self._tags.word):
                yield word, f"{self._lark.either(*map(self._constant, group))} {self._end()}"
        elif types and "string" not in types and isinstance(schema, dict):
            yield from self._json(types, with_definitions(schema, self._root))
        elif not self._tags.types:
            yield "", self._text()
        else:
            yield from self._of_any(types or JSON_TYPES, schema if types else None)

    def _of_any(self, types: frozenset[str], schema: Json) -> Iterator[tuple[str, str]]:
        if "string" in types:
            yield self._tags.types["string"], self._text()
        yield from self._json(
            types - TEXT, with_definitions(schema, self._root) if isinstance(schema, dict) else {}
        )

    def _json(self, types: frozenset[str], schema: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
        """Yield one alternative per type name that covers some of these types."""
        words = sorted({self._tags.types.get(kind, "") for kind in types})
        for word in words:
            of_word: list[Json] = [kind for kind in sorted(types) if self._tags.types.get(kind, "") == word]
            limit: Json = {"type": of_word}
            limited = {**schema, "allOf": [*parts_of(schema, "allOf"), limit]} if word else schema
            text = self._lark.schema(limited, self._tool.origin, lenient=True)
            yield word, f"{text} {self._end()}"

    def _end(self) -> str:
        return self._lark.literal(self._tags.padding + self._tags.value_end)

    def _constant(self, value: Json) -> str:
        return self._lark.literal(_text(value)) or '""'

    def _text_of(self, grammar: TextGrammar) -> str:
        opening, closing = self._tags.wrapper or ("", self._tags.padding)
        text = self._lark.text_until(grammar, closing + self._tags.value_end)
        return f"{self._lark.literal(opening)} {text}"

    def _text(self) -> str:
        if self._tags.wrapper is None:
            return self._lark.until(self._tags.value_end)
        opening, closing = self._tags.wrapper
        wrapped = f"{self._lark.literal(opening)} {self._lark.until(closing + self._tags.value_end)}"
        return self._lark.either(wrapped, self._lark.until(self._tags.value_end, unless=opening))


def with_definitions(schema: Mapping[str, Json], root: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return a part of a schema together with the definitions that its references need."""
    moved, has_moved = _moved(dict(schema))
    if not has_moved or not isinstance(moved, dict):
        return schema
    return {**moved, "$defs": {"root": _moved(dict(root))[0]}}


def _moved(schema: Json) -> tuple[Json, bool]:
    """Return the schema with references relative to `#/$defs/root`, and True if it has references."""
    if isinstance(schema, list):
        items = [_moved(item) for item in schema]
        return [item for item, _ in items], any(moved for _, moved in items)
    if not isinstance(schema, dict):
        return schema, False
    parts = {name: _moved(part) for name, part in schema.items()}
    copy = {name: part for name, (part, _) in parts.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = f"#/$defs/root{reference[1:]}"
    return copy, copy.get("$ref") != reference or any(moved for _, moved in parts.values())


def _text(value: Json) -> str:
    return value if isinstance(value, str) else written(value)
