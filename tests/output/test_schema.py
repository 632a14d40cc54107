"""The schema of an argument decides what its text means."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.formats.reading.json_text import is_strict, parsed, written
from start_llm.formats.reading.schema import Tools, decode, enum_values, flatten_arguments
from tests.output.corpus.case import TOOLS, TYPED, tool
from tests.output.corpus.typed import VALUES

TYPES = {
    "count": {"integer"},
    "ratio": {"number"},
    "flag": {"boolean"},
    "tags": {"array"},
    "options": {"object"},
    "nothing": {"null"},
    "mixed": {"string", "integer"},
    "optional": {"string", "null"},
    "listed": {"array", "string"},
    "mode": {"string"},
    "level": {"integer", "number"},
    "fixed": {"string"},
    "place": {"string"},
    "wrapped": {"string"},
    "slashed": {"string"},
    "lost": set(),
    "loop": set(),
    "half": set(),
    "free": set(),
    "open": set(),
}


@pytest.mark.parametrize("argument", TYPED)
def test_the_types_of_an_argument_are_what_its_schema_says(argument):
    assert TOOLS.types("typed", argument) == TYPES[argument]


WRITE: Any = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "additionalProperties": {"type": "integer"},
}
COMPOSED: dict[str, Any] = {
    "a reference": {"$ref": "#/$defs/Write", "$defs": {"Write": WRITE}},
    "a chain of references": {
        "$ref": "#/definitions/A",
        "definitions": {"A": {"$ref": "#/definitions/B"}, "B": WRITE},
    },
    "all of": {"allOf": [{"properties": {"other": {"type": "null"}}}, WRITE]},
    "any of": {"anyOf": [{"properties": {"other": {"type": "null"}}}, WRITE]},
    "one of": {"oneOf": [WRITE, WRITE]},
    "its own and others": {"properties": {"path": {"type": ["string", "null"]}}, "allOf": [WRITE]},
    "deep": {"anyOf": [{"allOf": [{"$ref": "#/$defs/Write"}]}], "$defs": {"Write": WRITE}},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_types_are_found_in_the_parts_of_a_schema(name):
    tools = Tools([{"type": "function", "function": {"name": "write", "parameters": COMPOSED[name]}}])
    assert tools.types("write", "path") == {"string"}
    assert tools.types("write", "unlisted") == {"integer"}


@pytest.mark.parametrize(
    ("reference", "types"),
    [
        ("#/properties/parent/anyOf/0", {"string"}),
        ("#/properties/parent/anyOf/7", set()),
        ("#/properties/parent/anyOf/x", set()),
        (f"#/properties/parent/anyOf/{'9' * 5000}", set()),
        ("#/$defs/My%20~1Name~0", {"string"}),
        ("#/anyOf/0/properties/a", {"integer"}),
        ("#/$defs/Self/properties/a", {"boolean"}),
        ("#name", set()),
        ("other.json#/$defs/Self", set()),
    ],
)
def test_a_reference_leads_through_lists_and_escaped_names(reference: str, types: set[str]):
    parameters: Any = {
        "properties": {
            "parent": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "child": {"$ref": reference},
        },
        "anyOf": [{"properties": {"a": {"type": "integer"}}}],
        "$defs": {"My /Name~": {"type": "string"}, "Self": {"properties": {"a": {"type": "boolean"}}}},
    }
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools.types("f", "child") == types


CIRCLE: Any = {f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{(level + 1) % 4}"}] * 200} for level in range(4)}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": ["a", 1]}, ["a", 1]),
        ({"const": None}, [None]),
        ({"$ref": "#/$defs/A"}, ["red"]),
        ({"allOf": [{"title": "A"}, {"$ref": "#/$defs/A"}]}, ["red"]),
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}, ["red", None]),
        ({"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]}, ["a", "b", "c"]),
        ({"anyOf": [{"const": "a"}, {"type": "string"}]}, []),
        ({"type": "string"}, []),
        ({"$ref": "#/nowhere"}, []),
        ({"$ref": "#/$defs/d0"}, []),
        (True, []),
    ],
)
def test_all_values_that_there_can_be_are_found(schema: Any, values: list[Any]):
    assert list(enum_values(schema, {"$defs": {"A": {"enum": ["red"]}, **CIRCLE}})) == values


def test_an_argument_that_alternatives_have_may_be_of_the_type_of_any():
    ways: Any = [{"properties": {"a": {"type": "string", "const": str(kind)}}} for kind in range(20)]
    ways += [{"properties": {"a": {"type": "integer"}}}]
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": {"anyOf": ways}}}])
    assert tools.types("f", "a") == {"string", "integer"}


@pytest.mark.parametrize(
    ("schema", "required"),
    [
        ({"required": ["a"], "allOf": [{"required": ["b"]}, {"required": ["a", "c"]}]}, ["a", "b", "c"]),
        ({"anyOf": [{"required": ["a", "b"]}, {"required": ["b", "c"]}]}, ["b"]),
        ({"oneOf": [{"required": ["a"]}, {}]}, []),
        ({"allOf": [{"required": "a"}, 5]}, []),
    ],
)
def test_what_all_alternatives_require_is_required(schema, required):
    assert flatten_arguments(schema)["required"] == required


def test_references_that_lead_to_many_others_are_followed_once():
    """As often as there are ways through them, this would take until tomorrow."""
    levels: Any = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 200, "properties": {f"p{level}": {}}}
        for level in range(4)
    }
    flattened = flatten_arguments({"$ref": "#/$defs/d0", "$defs": levels})
    assert flattened["properties"] == {f"p{level}": {} for level in range(4)}


def test_types_and_items_behind_many_references_are_found_at_once():
    """As often as there are ways to them, this would take until tomorrow too."""
    parameters: Any = {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": CIRCLE}
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools.types("f", "x") == set()
    assert tools.shape("f", "x").items.schema is None


def test_the_items_of_a_list_are_found_behind_a_reference():
    listed: Any = {"allOf": [{"$ref": "#/$defs/Empty"}, {"$ref": "#/$defs/List"}]}
    definitions: Any = {"Empty": {}, "List": {"type": "array", "items": {"type": "integer"}}}
    parameters = {"properties": {"x": listed}, "$defs": definitions}
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools.shape("f", "x").items.types == {"integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/nowhere"},
        {"$ref": "https://kettle.org/a"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
    ],
)
def test_where_no_arguments_are_found_any_may_be_given(schema):
    assert flatten_arguments(schema)["additionalProperties"] is True


def test_a_schema_that_lists_its_arguments_is_left_as_it_is():
    assert flatten_arguments(WRITE) is WRITE


@pytest.mark.parametrize(("argument", "raw", "value"), VALUES)
def test_a_text_becomes_the_value_that_the_schema_allows(argument, raw, value):
    decoded = decode(raw, TOOLS.types("typed", argument))
    assert decoded == value
    assert type(decoded) is type(value)


@given(st.text())
def test_text_stays_text(raw):
    assert decode(raw, frozenset({"string"})) == raw


@given(
    st.text('0123456789.eE+-"[]{}:, truefalsn\\\n', max_size=12) | st.text(),
    st.frozensets(st.sampled_from(["string", "number", "integer", "boolean", "array", "object", "null"])),
)
def test_every_text_has_a_value_that_can_be_sent(raw, types):
    value = decode(raw, types)
    assert json.loads(written(value), parse_constant=pytest.fail) == value
    written(value).encode()
    if not is_strict(raw):
        assert not isinstance(value, dict | list) or parsed(raw) == value


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "text"}, set()),
        ({"type": ["string", "text", 3]}, {"string"}),
        ({"type": {}}, set()),
        ({"enum": ["a", 1, None]}, {"string", "integer", "number", "null"}),
        ({"enum": [1.5, True, [], {}]}, {"number", "boolean", "array", "object"}),
        ({"enum": 5}, set()),
        ({"anyOf": []}, set()),
        ({"anyOf": "string"}, set()),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string", "integer"}),
        ({"anyOf": [{"anyOf": [{"type": "string"}]}, {"const": None}]}, {"string", "null"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, {"string"}),
        ({"allOf": [{"description": "anything"}]}, set()),
        ({"$ref": "https://example.com/schema"}, set()),
        ({"$ref": "#/type/x"}, set()),
        ({"$ref": 5, "type": "string"}, {"string"}),
        (None, set()),
        (False, set()),
        ("string", set()),
    ],
)
def test_a_schema_of_any_form_is_understood_or_says_nothing(schema, types):
    assert Tools([tool("x", {"a": schema})]).types("x", "a") == types


@pytest.mark.parametrize(
    "function",
    [{"name": "x"}, {"name": "x", "parameters": None}, {"name": "x", "parameters": {"properties": []}}],
)
def test_a_tool_without_a_schema_says_nothing(function):
    tools = Tools([{"type": "function", "function": function}])
    assert "x" in tools
    assert tools.types("x", "a") == frozenset()


def test_arguments_that_are_not_named_have_the_types_of_the_rest():
    tools = Tools([tool("x", {"a": {"type": "integer"}}, additionalProperties={"type": "string"})])
    assert tools.types("x", "a") == {"integer"}
    assert tools.types("x", "b") == {"string"}
    assert tools.types("y", "b") == frozenset()


def test_no_tools_are_false():
    assert not Tools([])
    assert Tools([tool("x")])
    assert "y" not in Tools([tool("x")])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(json_values)
def test_json_is_written_so_that_it_can_be_sent_and_read(value):
    text = written(value)
    text.encode()
    assert is_strict(text)
    assert parsed(text) == json.loads(text) == value


@pytest.mark.parametrize("text", ["NaN", "Infinity", "[-Infinity]", "1e999", "[1,]", "", "'a'", "1" * 5000])
def test_what_nobody_could_write_down_again_is_refused(text):
    with pytest.raises(ValueError):
        parsed(text)
