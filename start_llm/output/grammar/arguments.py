"""The arguments of a call in formats that put each of them between tags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import regex

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.output.grammar.lark import Lark, Origin
from start_llm.output.tool_calls.schema import Tools, constants, flat

_KEY = regex.compile(r"[^<>\"'\n]{1,256}")
_MOST_UNNAMED = 8


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that may be called. `parameters` is the schema of its arguments."""

    name: str
    parameters: Mapping[str, Json]

    @property
    def properties(self) -> Mapping[str, Json]:
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> Sequence[str]:
        found = self.parameters.get("required")
        return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

    @property
    def origin(self) -> Origin:
        return Origin("tools", f"the parameters of {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentTags:
    """What stands around one argument.

    Attributes:
        key: in front of the value, with `KEY` for its name.
        padding: between the tags and a value.
        value_end: behind the value; nothing in a value is it.
        behind: after that.
        wrapper: what may stand around a text.
    """

    key: str
    value_end: str
    behind: str = ""
    padding: str = ""
    wrapper: tuple[str, str] | None = None


class TaggedArguments:
    """Writes the arguments of one tool: those that are required, the others if the model wants them.

    Of the schema of an argument its type and its `enum` hold, and all of it where the value is JSON. A text
    may be any, whatever pattern or length the schema asks for.
    """

    def __init__(self, lark: Lark, tags: ArgumentTags, tool: Offered) -> None:
        self._lark = lark
        self._tags = tags
        self._root = tool.parameters
        self._tool = replace(tool, parameters=flat(tool.parameters))
        function: dict[str, Json] = {"name": tool.name, "parameters": dict(tool.parameters)}
        self._tools = Tools([{"type": "function", "function": function}])

    def expression(self) -> str:
        return " ".join(self._arguments()) or '""'

    def _arguments(self) -> Iterator[str]:
        required = self._tool.required
        names = dict.fromkeys([*self._tool.properties, *required])
        for name in names:
            if not _KEY.fullmatch(name):
                if name in required:
                    raise InvalidRequest(
                        f"'tools': {name!r} of {self._tool.name!r} has no form in this model's calls.",
                        param="tools",
                    )
                continue
            argument = self._argument(self._lark.literal(self._tags.key.replace("KEY", name)), name)
            yield argument if name in required else f"({argument})?"
        if not names and self._tool.parameters.get("additionalProperties") not in (None, False):
            yield f"({self._unnamed()}){{0,{_MOST_UNNAMED}}}"

    def _argument(self, opening: str, name: str) -> str:
        parts = [opening, self._lark.literal(self._tags.padding), self._value(name)]
        return self._lark.rule(" ".join(filter(None, [*parts, self._lark.literal(self._tags.behind)])))

    def _unnamed(self) -> str:
        before, after = self._tags.key.split("KEY")
        name = self._lark.pattern(r"[^<>\"'\n]{1,64}")
        return self._argument(f"{self._lark.literal(before)} {name} {self._lark.literal(after)}", "")

    def _value(self, name: str) -> str:
        """The value, and what ends it."""
        types = self._tools.types(self._tool.name, name)
        schema = self._tool.properties.get(name)
        values = constants(schema, self._root)
        if values and "string" in types:
            return f"{self._lark.either(*map(self._constant, values))} {self._end()}"
        if types and "string" not in types and isinstance(schema, dict):
            text = self._lark.schema(_alone(schema, self._root), self._tool.origin, lenient=True)
            return f"{text} {self._end()}"
        return self._text()

    def _end(self) -> str:
        return self._lark.literal(self._tags.padding + self._tags.value_end)

    def _constant(self, value: Json) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return self._lark.literal(text) or '""'

    def _text(self) -> str:
        if self._tags.wrapper is None:
            return self._lark.until(self._tags.value_end)
        opening, closing = self._tags.wrapper
        wrapped = f"{self._lark.literal(opening)} {self._lark.until(closing + self._tags.value_end)}"
        return self._lark.either(wrapped, self._lark.until(self._tags.value_end, unless=opening))


def _alone(schema: Mapping[str, Json], root: Mapping[str, Json]) -> Mapping[str, Json]:
    """A part of a schema that takes along what its references lead to."""
    moved, has_moved = _moved(dict(schema))
    if not has_moved or not isinstance(moved, dict):
        return schema
    return {**moved, "$defs": {"root": _moved(dict(root))[0]}}


def _moved(schema: Json) -> tuple[Json, bool]:
    """A schema whose references start from `#/$defs/root`, and whether it has any."""
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
