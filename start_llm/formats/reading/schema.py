"""Looks up argument types and shapes in the schemas of the offered tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from urllib.parse import unquote

import regex

from start_llm.core.chat import Json
from start_llm.formats.reading.json_text import parsed
from start_llm.formats.reading.literals import CONSTANTS, literal

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_NAME = regex.compile(r"[\w.:/\-]{1,128}")
_NAMESPACE = regex.compile(r"\A.*(?:__|[./:])(?=.)")
"""Of a tool: what stands in front of its own name."""
_PREFIX = regex.compile(r"\A(?:functions?|tools?|default_api)[.:/]", regex.IGNORECASE)
TEXT = frozenset({"string"})
_DEEPEST_REFERENCE = 8
_MAX_DIGITS = 9
"""Of a place in a list, in a reference. Python refuses to convert thousands of digits."""
COMPOSING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
"""Keywords that compose a schema from others."""


_TYPES_OF: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset(),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


class Tools:
    """Names and argument schemas of the offered tools.

    Args:
        tools: function tools in the format of OpenAI's chat protocol.
        are_all: the request has no other tools. Else another name may be that of one that may not be called.

    Attributes:
        is_unquoted: calls of them stand in the model's own notation and outside of quotation.
    """

    def __init__(self, tools: Sequence[Mapping[str, Json]], *, are_all: bool = True) -> None:
        self._are_all, self._takes_any = are_all, False
        self.is_unquoted = False
        definitions = [_object(tool.get("function")) for tool in tools]
        functions = [(str(function["name"]), _object(function.get("parameters"))) for function in definitions]
        self._roots = dict(functions)
        self._parameters = {name: flatten_arguments(parameters) for name, parameters in functions}

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the tools."""
        return iter(self._parameters)

    @cached_property
    def taking_any(self) -> Tools:
        """These tools, and every other name: the client answers that there is no such tool."""
        tools = copy(self)
        tools.is_unquoted = True
        tools._takes_any = self._are_all and bool(self)
        return tools

    def meant(self, name: str) -> str | None:
        """Return the tool that a model means by a name, or None if it is no tool.

        It may have written the name in other letters, with a prefix of its training, or without the
        namespace of the offered one.
        """
        if name in self._parameters:
            return name
        alike = self._alike.get(_bare_name(name), [])
        if len(alike) == 1:
            return alike[0]
        return name if self._takes_any and _NAME.fullmatch(name) else None

    @cached_property
    def _alike(self) -> Mapping[str, list[str]]:
        alike: dict[str, list[str]] = {}
        for name in self._parameters:
            for form in {_bare_name(name), _bare_name(_NAMESPACE.sub("", name))}:
                alike.setdefault(form, []).append(name)
        return alike

    def arguments(self, tool: str) -> Sequence[str]:
        """Return the names of a tool's arguments in the order in which its schema lists them."""
        return tuple(_object(self._parameters.get(tool, {}).get("properties")))

    def types(self, tool: str, argument: str) -> frozenset[str]:
        """Return the JSON types that the schema allows for an argument; empty if the schema does not say."""
        return self.shape(tool, argument).types

    def shape(self, tool: str, argument: str) -> Shape:
        """Return the part of the schema that describes an argument."""
        parameters = self._parameters.get(tool, {})
        return Shape(dict(parameters), self._roots.get(tool, {})).member(argument)


def _bare_name(name: str) -> str:
    return _PREFIX.sub("", name.strip()).casefold()


@dataclass(frozen=True, slots=True)
class Shape:
    """The schema of a value. References are resolved against `root`."""

    schema: Json
    root: Mapping[str, Json]

    @property
    def types(self) -> frozenset[str]:
        return _types(self.schema, self.root, {}, _DEEPEST_REFERENCE)

    @property
    def items(self) -> Shape:
        """The shape of each item of an array."""
        return Shape(_stated("items", self.schema, self.root, {}, _DEEPEST_REFERENCE), self.root)

    def member(self, name: str) -> Shape:
        """Return the shape of a member of an object."""
        whole = flatten_arguments(_object(self.schema), self.root)
        properties = _object(whole.get("properties"))
        return Shape(properties.get(name, whole.get("additionalProperties")), self.root)


def _stated(word: str, schema: Json, root: Mapping[str, Json], known: dict[str, Json], depth: int) -> Json:
    """Return the first value of a keyword in a schema, its reference or its parts.

    Follow each reference once and cache it in `known`, as in `_listed`.
    """
    if not isinstance(schema, dict) or depth == 0:
        return None
    if word in schema:
        return schema[word]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = None
            known[reference] = _stated(word, resolve(reference, root), root, known, depth - 1)
        if known[reference] is not None:
            return known[reference]
    parts = [part for way in ("allOf", "anyOf", "oneOf") for part in parts_of(schema, way)]
    values = (_stated(word, part, root, known, depth - 1) for part in parts)
    return next((value for value in values if value is not None), None)


def flatten_arguments(
    parameters: Mapping[str, Json], root: Mapping[str, Json] | None = None
) -> Mapping[str, Json]:
    """Return an arguments schema that includes the properties of its `$ref`, `allOf`, `anyOf` and `oneOf`.

    An argument is required if every alternative requires it. If no properties are found, any are allowed.

    Args:
        root: the schema that references are resolved against; `parameters` by default.
    """
    if COMPOSING.isdisjoint(parameters):
        return parameters
    listed = _listed(dict(parameters), root or parameters, {}, _DEEPEST_REFERENCE)
    rest = {word: value for word, value in parameters.items() if word not in COMPOSING}
    if not listed.properties:
        rest.setdefault("additionalProperties", True)
    elif listed.others is not None:
        rest["additionalProperties"] = listed.others
    return {**rest, "properties": dict(listed.properties), "required": list(listed.required)}


@dataclass(frozen=True, slots=True)
class _Listed:
    """The arguments that a schema lists. `others`: its schema for arguments that it does not list."""

    properties: Mapping[str, Json]
    required: Sequence[str]
    others: Json


_NOTHING = _Listed({}, (), None)


def _listed(schema: Json, root: Mapping[str, Json], known: dict[str, _Listed], depth: int) -> _Listed:
    """Collect the arguments of a schema. Follow each reference once; `known` caches them and ends cycles."""
    if not isinstance(schema, dict) or depth == 0:
        return _NOTHING
    required = schema.get("required")
    parts = [
        _Listed(
            properties=_object(schema.get("properties")),
            required=[name for name in required if isinstance(name, str)]
            if isinstance(required, list)
            else [],
            others=schema.get("additionalProperties"),
        )
    ]
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = _NOTHING
            known[reference] = _listed(resolve(reference, root), root, known, depth - 1)
        parts.append(known[reference])
    parts += [_listed(part, root, known, depth - 1) for part in parts_of(schema, "allOf")]
    for word in ("anyOf", "oneOf"):
        ways = [_listed(part, root, known, depth - 1) for part in parts_of(schema, word)]
        parts += [_any_of(ways)] if ways else []
    return _all_of(parts)


def _all_of(parts: Sequence[_Listed]) -> _Listed:
    return _Listed(
        properties=_merged(parts, "allOf"),
        required=list(dict.fromkeys(name for part in parts for name in part.required)),
        others=next((part.others for part in parts if part.others is not None), None),
    )


def _any_of(ways: Sequence[_Listed]) -> _Listed:
    return _Listed(
        properties=_merged(ways, "anyOf"),
        required=[name for name in ways[0].required if all(name in way.required for way in ways)],
        others=next((way.others for way in ways if way.others), None),
    )


def _merged(parts: Sequence[_Listed], word: str) -> Mapping[str, Json]:
    schemas: dict[str, list[Json]] = {}
    for part in parts:
        for name, schema in part.properties.items():
            distinct = schemas.setdefault(name, [])
            if schema not in distinct:
                distinct.append(schema)
    return {
        name: distinct[0] if len(distinct) == 1 else {word: distinct} for name, distinct in schemas.items()
    }


def decode(raw: str, types: frozenset[str]) -> Json:
    """Parse a value that a model wrote without stating its type.

    Text stays text, byte for byte. If text and other types are allowed, the value has another type only if it
    parses as that type. If text is not allowed or the schema does not say, the value is parsed as JSON if
    possible. If text is not allowed, an array or an object may also be in Python's notation.
    """
    if types == TEXT:
        return raw
    try:
        value = _read(raw, types)
    except (ValueError, RecursionError):
        return raw
    return raw if "string" in types and not _type_of(value) & types else value


def _read(raw: str, types: frozenset[str]) -> Json:
    """Parse a value. Python's constants count where the schema expects one.

    Raises:
        ValueError: `raw` is not a value.
    """
    word = raw.strip()
    if word in CONSTANTS and _type_of(CONSTANTS[word]) & types:
        return CONSTANTS[word]
    try:
        return parsed(raw)
    except ValueError:
        return _as_python_writes(raw, types)


def _as_python_writes(raw: str, types: frozenset[str]) -> Json:
    """Parse an array or an object in Python's notation.

    Raises:
        ValueError: the value is neither, or the schema allows text or does not say.
    """
    value = literal(raw) if types and "string" not in types else None
    if not isinstance(value, list | dict) or not _type_of(value) & types:
        raise ValueError("the value has another form")
    return value


def _type_of(value: Json) -> frozenset[str]:
    """Return the schema types of a value. Text has none here, because it may stand for any type."""
    if isinstance(value, float) and value.is_integer():
        return frozenset({"integer", "number"})
    return _TYPES_OF[type(value)]


def _types(
    schema: Json, root: Mapping[str, Json], known: dict[str, frozenset[str]], depth: int
) -> frozenset[str]:
    """Return every type that a value may have. An alternative without types makes the result empty.

    Follow each reference once and cache it in `known`, as in `_listed`.
    """
    if not isinstance(schema, dict) or depth == 0:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = frozenset()
            known[reference] = _types(resolve(reference, root), root, known, depth - 1)
        return known[reference]
    stated = schema.get("type")
    if isinstance(stated, str | list):
        names = [stated] if isinstance(stated, str) else stated
        return frozenset(name for name in names if isinstance(name, str)) & JSON_TYPES
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return frozenset[str]().union(*map(types_of, values if isinstance(values, list) else []))
    if "allOf" in schema:
        return _shared([_types(part, root, known, depth - 1) for part in parts_of(schema, "allOf")])
    ways = [part for word in ("anyOf", "oneOf") for part in parts_of(schema, word)]
    parts = [_types(part, root, known, depth - 1) for part in ways]
    return frozenset[str]().union(*parts) if parts and all(parts) else frozenset()


def _shared(parts: Sequence[frozenset[str]]) -> frozenset[str]:
    """Return the types that all parts with types have in common."""
    stated = [part for part in parts if part]
    return reduce(frozenset[str].intersection, stated) if stated else frozenset()


def types_of(value: Json) -> frozenset[str]:
    """Return the schema types of a value."""
    return frozenset({"string"}) if isinstance(value, str) else _type_of(value)


def enum_values(schema: Json, root: Mapping[str, Json]) -> Sequence[Json]:
    """Return all possible values if the schema enumerates them, directly or through references and parts."""
    return _constants(schema, root, {}, _DEEPEST_REFERENCE)


def _constants(
    schema: Json, root: Mapping[str, Json], known: dict[str, Sequence[Json]], depth: int
) -> Sequence[Json]:
    """Collect the values. Follow each reference once and cache it in `known`, as in `_listed`."""
    if not isinstance(schema, dict) or depth == 0:
        return ()
    if named := _named(schema):
        return named
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = ()
            known[reference] = _constants(resolve(reference, root), root, known, depth - 1)
        return known[reference]
    of_all = (_constants(part, root, known, depth - 1) for part in parts_of(schema, "allOf"))
    if values := next(filter(None, of_all), None):
        return values
    parts = [part for word in ("anyOf", "oneOf") for part in parts_of(schema, word)]
    ways = [_constants(part, root, known, depth - 1) for part in parts]
    return [value for way in ways for value in way] if all(ways) else ()


def _named(schema: Mapping[str, Json]) -> Sequence[Json]:
    if "const" in schema:
        return (schema["const"],)
    values = schema.get("enum", [None] if schema.get("type") == "null" else None)
    return values if isinstance(values, list) else ()


def parts_of(schema: Mapping[str, Json], word: str) -> Sequence[Json]:
    """Return the schemas of an `allOf`, an `anyOf` or a `oneOf`."""
    parts = schema.get(word)
    return parts if isinstance(parts, list) else ()


def resolve(reference: str, root: Mapping[str, Json]) -> Json:
    """Resolve a local reference such as `#/$defs/Path` or `#`. None if it points nowhere."""
    node: Json = dict(root)
    front, *steps = reference.split("/")
    if front != "#":
        return None
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and len(name) <= _MAX_DIGITS:
            node = node[int(name)] if int(name) < len(node) else None
        else:
            return None
    return node


def _object(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}
