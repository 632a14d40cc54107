"""Adapts schemas of tools to templates that show only parts of them: the description tells the rest.

A part of a schema is named by the keywords that lead to it: `properties.items.enum` is the choice for items
of an argument that is a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from start_llm.core.chat import Json
from start_llm.prompt.facts import TemplateFacts

type Tool = Mapping[str, Json]

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_INSIDE = frozenset(
    {"items", "prefixItems", "contains", "additionalProperties", "not", "anyOf", "oneOf", "allOf"}
    | {"if", "then", "else", "propertyNames"}
)
_SAYS_NOTHING = frozenset({"type", "required", "additionalProperties", "$schema", "strict"})
_NO_ARGUMENTS: Mapping[str, Json] = {"type": "object", "properties": {}}


def parts(schema: Json, path: str = "") -> Iterator[str]:
    """Yield the parts of a schema that carry information."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            for inner in value.values():
                yield f"{path}{keyword}"
                yield from parts(inner, f"{path}{keyword}.")
        elif keyword in _INSIDE and isinstance(value, dict | list):
            for inner in value if isinstance(value, list) else [value]:
                yield from parts(inner, f"{path}{keyword}.")
        elif keyword not in _SAYS_NOTHING:
            yield f"{path}{keyword}"


def fitted(tool: Tool, facts: TemplateFacts) -> Tool:
    """Return the tool as its template needs it; its description tells what is not shown elsewhere."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    if not facts.takes_bare_tools:
        function = _filled(function)
    if facts.schema_parts is not None:
        function = _told(function, facts.schema_parts, facts.refused_parts)
    return {**tool, "function": function}


def _filled(function: dict[str, Json]) -> dict[str, Json]:
    parameters = function.get("parameters")
    given = parameters if isinstance(parameters, dict) else {}
    return {
        **function,
        "description": function.get("description") or "",
        "parameters": {**_NO_ARGUMENTS, "required": [], **given},
    }


def _told(function: dict[str, Json], shown: frozenset[str], refused: frozenset[str]) -> dict[str, Json]:
    parameters = function.get("parameters")
    said = frozenset(parts(parameters))
    if said <= shown:
        return function
    schema = json.dumps(parameters, ensure_ascii=False)
    told = f"{function.get('description') or ''} Parameters in full, as a JSON schema: {schema}".lstrip()
    return {
        **function,
        "description": told,
        "parameters": dict(_NO_ARGUMENTS) if said & refused else parameters,
    }
