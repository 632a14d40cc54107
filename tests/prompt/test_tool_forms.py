"""A tool has what its template needs, and its description tells what the template does not show."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from start_llm.prompt.template_audit.facts import TemplateFacts
from start_llm.prompt.template_audit.tool_forms import ToolForms
from tests.prompt.fakes import FakeTokenizer, WatchedTokenizer, function

ALL = "{{- tool.function | tojson -}}"
NAMES = """
{{- tool.function.name ~ ': ' ~ tool.function.description -}}
{%- for name, schema in tool.function.parameters.properties.items() -%}
    {{- name ~ ' ' ~ (schema.description or '') ~ ';' -}}
{%- endfor -%}
"""
STRICT = NAMES.replace(
    "(schema.description or '')",
    "(schema.description if schema.description is string and schema.type is string else 'no'.x.y)",
)
NESTED: Any = function(
    "todo", todos={"type": "array", "items": {"type": "object", "properties": {"a": {"enum": ["b"]}}}}
)
FLAT: Any = function("read", path={"type": "string", "description": "Where."})
NAMED: Any = {"type": "function", "function": {"name": "now"}}


def template_of(shown: str) -> str:
    tools = f"{{%- for tool in tools or [] -%}}{shown}{{%- endfor -%}}"
    return f"{tools}{{%- for message in messages -%}}{{{{- message.content -}}}}{{%- endfor -%}}"


def forms_of(shown: str, **facts: Any) -> ToolForms:
    return ToolForms(FakeTokenizer(template_of(shown)), TemplateFacts(**facts))


def form_of(shown: str, tool: Any) -> Any:
    (form,) = forms_of(shown).shown((tool,))
    return form["function"]


def description_of(tool: Any) -> str:
    return f"Parameters in full, as a JSON schema: {json.dumps(tool['function']['parameters'])}"


@pytest.mark.parametrize("tool", [NESTED, FLAT, NAMED, {"type": "other"}])
def test_a_template_that_shows_everything_gets_tools_as_they_are(tool):
    assert forms_of(ALL).shown((tool,)) == (tool,)


def test_a_template_that_shows_no_tools_gets_them_as_they_are():
    assert forms_of("", takes_tools=False).shown((NESTED,)) == (NESTED,)


def test_a_tool_that_is_shown_whole_is_described_nowhere_else():
    assert form_of(NAMES, FLAT) == FLAT["function"]


def test_what_is_not_shown_is_added_to_the_description():
    given = NESTED["function"]
    assert form_of(NAMES, NESTED) == {**given, "description": f"What todo does. {description_of(NESTED)}"}


UNSHOWN: Sequence[Any] = (
    {"type": "string", "enum": ["x"]},
    {"type": "integer", "enum": [71, 72]},
    {"type": "string", "default": "x"},
    {"type": "boolean", "default": True},
    {"type": "integer", "minimum": 5},
    {"oneOf": [{"type": "string", "const": "x"}, {"type": "null"}]},
    {"$ref": "#/$defs/one"},
    {"type": "object", "additionalProperties": {"type": "string", "description": "What."}},
    {"type": "array", "items": {"type": "array", "items": {"properties": {"x": True}}}},
    {"type": "object", "properties": {"description": {"type": "string"}}},
    {"type": "string", "examples": [{"x": "y"}]},
)


@pytest.mark.parametrize("schema", UNSHOWN, ids=json.dumps)
def test_any_part_of_a_schema_that_is_not_shown_is_described(schema):
    tool = function("set", key=schema)
    assert form_of(NAMES, tool)["description"] == f"What set does. {description_of(tool)}"
    assert form_of(ALL, tool) == tool["function"]


def test_a_word_that_stands_twice_in_a_tool_is_shown_twice():
    hidden = function("set", key={"type": "string", "description": "The mode.", "enum": ["mode"]})
    assert description_of(hidden) in form_of(NAMES, hidden)["description"]


def test_words_of_the_template_are_not_those_of_a_tool():
    tool = function("set", key={"type": "string", "default": "usual"})
    assert description_of(tool) in form_of(f"The default is usual. {NAMES}", tool)["description"]


def test_texts_of_several_lines_may_be_shown_line_by_line_or_escaped():
    text = 'One "line",\n  größe {{ and }}\n\n\tthe next.'
    tool = {"type": "function", "function": {**FLAT["function"], "description": text}}
    by_line = "{{- tool.function.description.split('\\n') | map('trim') | join(' / ') -}}"
    for shown in (ALL, NAMES, NAMES.replace("tool.function.description", f"'' {by_line[3:-4]}")):
        assert form_of(shown if "split" not in shown else f"{by_line}{NAMES}", tool) == tool["function"]


def test_a_tool_without_a_description_or_parameters_gets_empty_ones_where_it_is_refused():
    nothing = {"type": "object", "properties": {}, "required": []}
    nulled: Any = {"type": "function", "function": {"name": "now", "description": None, "parameters": None}}
    for tool in (NAMED, nulled):
        assert form_of(NAMES, tool) == {"name": "now", "description": "", "parameters": nothing}
    assert form_of(NAMES, FLAT) == FLAT["function"]


def test_an_argument_without_a_description_gets_an_empty_one_where_it_is_refused():
    plain: Any = function("read", path={"type": "string"}, at={"type": "object", "properties": {}})
    given = form_of(STRICT, plain)["parameters"]["properties"]
    assert given == {
        "path": {"type": "string", "description": ""},
        "at": {"type": "object", "properties": {}, "description": ""},
    }


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "integer"),
        ({"oneOf": [{"type": "array"}, {"type": "null"}]}, "array"),
        ({"type": ["null", "boolean"]}, "boolean"),
        ({"const": 7}, "string"),
    ],
)
def test_an_argument_that_is_refused_keeps_its_name_and_one_type(schema, kind):
    tool: Any = function("set", key={**schema, "description": "What."})
    form = form_of(STRICT, tool)
    assert form["description"] == f"What set does. {description_of(tool)}"
    assert form["parameters"]["properties"] == {"key": {"type": kind, "description": "What."}}


def test_arguments_that_are_refused_whatever_they_have_are_reported_alone():
    strict = f"{{{{- 'no'.x.y if tool.function.parameters.properties else '' -}}}}{NAMES}"
    form = form_of(strict, FLAT)
    assert form["description"] == f"What read does. {description_of(FLAT)}"
    assert form["parameters"] == {"type": "object", "properties": {}}


def test_a_tool_that_is_always_refused_stays_as_it_is():
    assert form_of("{{- 'no'.x.y -}}", FLAT) == FLAT["function"]


def test_a_tool_is_rendered_once_and_then_known():
    tokenizer = WatchedTokenizer(FakeTokenizer(template_of(NAMES)))
    forms = ToolForms(tokenizer, TemplateFacts())
    first, before = forms.shown((NESTED, FLAT)), len(tokenizer.rendered)
    assert forms.shown((NESTED, FLAT)) == first
    assert len(tokenizer.rendered) == before


def test_known_tools_are_forgotten_by_their_size():
    tokenizer = WatchedTokenizer(FakeTokenizer(template_of(NAMES)))
    forms = ToolForms(tokenizer, TemplateFacts())
    tools: Any = [{"type": "function", "function": {"name": f"{n}" * 2**20}} for n in range(3)]
    first, *others = tools
    forms.shown((first, *others))
    before = len(tokenizer.rendered)
    forms.shown(others)
    assert len(tokenizer.rendered) == before
    forms.shown((first,))
    assert len(tokenizer.rendered) > before


def test_a_truth_is_another_default_than_one():
    forms = forms_of(ALL)
    for default in (True, 1, 1.0):
        (form,) = forms.shown((function("set", key={"default": default}),))
        assert json.dumps(form).count(json.dumps({"default": default})) == 1
