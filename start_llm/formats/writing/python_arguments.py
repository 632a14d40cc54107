"""Writes arguments as Python keywords and literals, and their grammar."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.python_calls import KEY
from start_llm.formats.reading.schema import Tools, enum_values, flatten_arguments
from start_llm.formats.writing.arguments import with_definitions
from start_llm.formats.writing.call_text import Arguments
from start_llm.formats.writing.callable_tool import CallableTool
from start_llm.formats.writing.lark import Lark, separated

_COMMA = '", "'
_MAX_UNNAMED = 8
_COMMENTS = frozenset({"title", "description", "default", "examples"})
_NO_NUMBER: Mapping[str, Json] = {"type": ["string", "boolean", "null", "array", "object"]}
_NUMBER = r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?"
"""Limits the digits, so that no number is too large to parse."""
_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


class PythonArguments:
    """Writes `(key='text', other=[1, None])`."""

    def write(self, arguments: Arguments) -> str:
        return f"({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def expression(self, lark: Lark, tool: CallableTool) -> str:
        """Return a grammar for keywords in the schema's order. Optional ones may be left out.

        A value is JSON of its schema, which Python's notation shares except for three words, or one of those
        words.
        """
        return f'"(" {_PythonGrammar(lark, tool).keywords()} ")"'


class _PythonGrammar:
    def __init__(self, lark: Lark, tool: CallableTool) -> None:
        self._lark = lark
        self._root = tool.parameters
        self._tool = replace(tool, parameters=flatten_arguments(tool.parameters))
        self._tools = Tools([tool.definition])

    def keywords(self) -> str:
        required = self._tool.required
        names = dict.fromkeys([*self._tool.properties, *required])
        if unsayable := [name for name in required if not regex.fullmatch(KEY, name)]:
            raise self._tool.has_no_form_for(unsayable[0])
        keywords = {name: self._keyword(name) for name in names if regex.fullmatch(KEY, name)}
        if keywords:
            return separated(self._lark, keywords, required, _COMMA)
        return self._unnamed() if not names and self._tool.takes_others else '""'

    def _unnamed(self) -> str:
        keyword = self._lark.rule(f'{self._lark.pattern("[a-z_]{1,64}")} "=" {self._value("")}')
        return f"({keyword} ({_COMMA} {keyword}){{0,{_MAX_UNNAMED - 1}}})?"

    def _keyword(self, name: str) -> str:
        return self._lark.rule(f"{self._lark.literal(f'{name}=')} {self._value(name)}")

    def _value(self, name: str) -> str:
        schema = self._tool.schema_of(name)
        if self._tool.grammar:
            return self._lark.json_text(self._tool.grammar)
        values = enum_values(schema, self._root)
        if values and not any(isinstance(value, list | dict) for value in values):
            texts = dict.fromkeys(text for value in values for text in (repr(value), written(value)))
            return self._lark.either(*map(self._lark.literal, texts))
        return self._lark.either(*self._ways(name, schema))

    def _ways(self, name: str, schema: Json) -> Iterator[str]:
        if not isinstance(schema, dict) or _COMMENTS.issuperset(schema):
            yield self._lark.schema(_NO_NUMBER, self._tool.origin, lenient=True)
            yield self._lark.pattern(_NUMBER)
            return
        yield self._lark.schema(with_definitions(schema, self._root), self._tool.origin, lenient=True)
        if not enum_values(schema, self._root):
            for kind in self._tools.types(self._tool.name, name):
                yield from map(self._lark.literal, _WORDS.get(kind, ()))
