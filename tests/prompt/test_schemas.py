"""A tool has what its template needs, and its description tells what the template does not show."""

import json
from typing import Any

from start_llm.prompt.facts import TemplateFacts
from start_llm.prompt.schemas import fitted, parts
from tests.prompt.fakes import function

NESTED: Any = function(
    "todo", todos={"type": "array", "items": {"type": "object", "properties": {"a": {"enum": ["b"]}}}}
)
FLAT: Any = function("read", path={"type": "string", "description": "Where."})
NAMED: Any = {"type": "function", "function": {"name": "now"}}
SHOWS_FLAT = TemplateFacts(schema_parts=frozenset({"properties", "properties.description"}))


def test_parts_of_a_schema_are_named_by_the_keywords_on_the_way_to_them():
    schema: Any = {
        "type": "object",
        "$schema": "http",
        "properties": {
            "a": {"type": "string", "enum": ["x"]},
            "b": {"type": "array", "items": {"properties": {"c": {"description": "d"}}}},
            "e": {"anyOf": [{"const": 1}, True]},
            "f": {"additionalProperties": {"format": "g"}},
            "h": {"additionalProperties": False},
            "i": True,
        },
        "required": ["a"],
        "$defs": {"j": {"title": "k"}},
    }
    assert set(parts(schema)) == {
        "properties",
        "properties.enum",
        "properties.items.properties",
        "properties.items.properties.description",
        "properties.anyOf.const",
        "properties.additionalProperties.format",
        "$defs",
        "$defs.title",
    }
    assert list(parts(None)) == []


def test_a_template_that_takes_everything_gets_tools_as_they_are():
    tools: list[Any] = [NESTED, FLAT, NAMED, {"type": "other"}]
    for tool in tools:
        assert fitted(tool, TemplateFacts()) == tool


def test_a_tool_that_is_shown_whole_is_told_nowhere_else():
    assert fitted(FLAT, SHOWS_FLAT) == FLAT


def test_what_is_not_shown_is_told_in_the_description():
    about: Any = fitted(NESTED, SHOWS_FLAT)["function"]
    given = NESTED["function"]
    told = f"Parameters in full, as a JSON schema: {json.dumps(given['parameters'])}"
    assert about == {**given, "description": f"What todo does. {told}"}


def test_what_is_refused_is_told_in_the_description_alone():
    facts = TemplateFacts(
        schema_parts=frozenset({"properties", "properties.description"}),
        refused_parts=frozenset({"properties.items.properties"}),
    )
    about: Any = fitted(NESTED, facts)["function"]
    assert '"enum": ["b"]' in about["description"]
    assert about["parameters"] == {"type": "object", "properties": {}}
    assert fitted(FLAT, facts) == FLAT


def test_a_tool_without_a_description_or_parameters_gets_empty_ones():
    facts = TemplateFacts(takes_bare_tools=False)
    nothing = {"type": "object", "properties": {}, "required": []}
    assert fitted(NAMED, facts)["function"] == {"name": "now", "description": "", "parameters": nothing}
    nulled: Any = {"type": "function", "function": {"name": "now", "description": None, "parameters": None}}
    assert fitted(nulled, facts) == fitted(NAMED, facts)
    assert fitted(FLAT, facts) == FLAT


def test_what_is_no_function_is_left_to_the_template():
    facts = TemplateFacts(takes_bare_tools=False, schema_parts=frozenset())
    assert fitted({"type": "other"}, facts) == {"type": "other"}
