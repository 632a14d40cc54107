"""Finds the form in which a template shows all of a tool: it renders the tool and looks for its words.

Templates that do not print a tool's JSON schema leave parts of it out, or refuse what they do not expect.
What is not shown is added to the tool's description.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.recently_used import RecentlyUsed
from start_llm.prompt.template import Rendering, TemplateMessage, TemplateTokenizer
from start_llm.prompt.template_audit.facts import TemplateFacts

type Tool = Mapping[str, Json]
type Function = dict[str, Json]

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_INSIDE = frozenset(
    {"items", "prefixItems", "contains", "additionalProperties", "not", "anyOf", "oneOf", "allOf"}
    | {"if", "then", "else", "propertyNames"}
)
_SAYS_NOTHING = frozenset({"type", "required", "$schema", "strict"})
_SHOWN_BY_VALUE = frozenset({"description", "title", "enum", "const"})
"""Keywords that a template may leave out if it shows their values."""
_NO_ARGUMENTS: Mapping[str, Json] = {"type": "object", "properties": {}}
_QUESTION: TemplateMessage = {"role": "user", "content": "?"}
_NO_SYSTEM: TemplateMessage = {"role": "system", "content": ""}
_ANY_TIME = datetime(2000, 1, 1, tzinfo=UTC)
_NOTHING: Function = {"name": "ꙮ", "description": "ꙮ", "parameters": {**_NO_ARGUMENTS, "required": []}}
"""A function whose words are in no other."""
_MAX_BYTES = 16 * 2**20
_BYTES_A_CHARACTER = 6
"""Approximate size of a form and its key for each character of its JSON."""


class ToolForms:
    """The forms of tools for one template. Safe to use from any thread.

    A tool's form depends on the tool and the template alone, so it is found once.
    """

    def __init__(self, tokenizer: TemplateTokenizer, facts: TemplateFacts) -> None:
        self._tokenizer = tokenizer
        self._takes_tools = facts.takes_tools
        self._talk = (_NO_SYSTEM, _QUESTION) if facts.tools_need_system else (_QUESTION,)
        self._known = RecentlyUsed[str, Tool](
            _MAX_BYTES, lambda form: _BYTES_A_CHARACTER * len(json.dumps(form))
        )

    def shown(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools as the template needs them."""
        return tuple(map(self._form_of, tools)) if self._takes_tools else tuple(tools)

    def _form_of(self, tool: Tool) -> Tool:
        function = tool.get("function")
        if not isinstance(function, dict):
            return tool
        key = json.dumps(tool)
        form = self._known.get(key)
        if form is None:
            form = {**tool, "function": self._shown(function)}
            self._known.put(key, form)
        return form

    def _shown(self, function: Function) -> Function:
        """Return the first form that shows everything; else the first of those that hide the least."""
        best, hidden = function, math.inf
        for form in _forms(function):
            text = self._rendered(form)
            count = self._hidden(text, function) if text else math.inf
            if count < hidden:
                best, hidden = form, count
            if not hidden:
                break
        return best

    def _rendered(self, function: Function) -> str:
        """Return the prompt with this function alone; empty if the template refuses it."""
        tool: Tool = {"type": "function", "function": function}
        rendering = Rendering(self._tokenizer, (tool,), {}, _ANY_TIME.strftime)
        try:
            return rendering.text(self._talk, add_generation_prompt=True)
        except InvalidRequest:
            return ""

    @cached_property
    def _without(self) -> str:
        """The prompt with a function that says nothing."""
        return self._rendered(_NOTHING)

    def _hidden(self, text: str, function: Function) -> int:
        """Return how many words of the function the text does not have as often as the function has them."""
        words = list(_all_words(function))
        whole = "\n".join(words)
        return sum(
            _count(text, word) - _count(self._without, word) < whole.count(word)
            for word in dict.fromkeys(words)
        )


def is_changed(tool: Tool, form: Tool) -> tuple[bool, bool]:
    """Return whether a form fills what its tool leaves out, and whether its description tells the schema."""
    before, after = (json.dumps(version.get("function")) for version in (tool, form))
    tells = _IN_FULL in after and _IN_FULL not in before
    return before != after and not tells, tells


def _count(text: str, word: str) -> int:
    escaped = (json.dumps(word, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    return max(map(text.count, {word, *escaped}))


# ------------------------------------------------------------------------------------ words of a function


def _all_words(function: Function) -> Iterator[str]:
    yield from _texts(function.get("name"))
    yield from _texts(function.get("description"))
    yield from _words(function.get("parameters"))


def _words(schema: Json) -> Iterator[str]:
    """Yield the words of a schema: names of arguments, values, and keywords that say something."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            yield from value
            yield from (word for inner in value.values() for word in _words(inner))
        elif keyword in _INSIDE:
            for inner in value if isinstance(value, list) else [value]:
                yield from _words(inner)
        elif keyword not in _SAYS_NOTHING:
            yield from () if keyword in _SHOWN_BY_VALUE else (keyword,)
            yield from _texts(value)


def _texts(value: Json) -> Iterator[str]:
    """Yield the texts and numbers in a value, texts line by line."""
    match value:
        case str():
            yield from filter(None, map(str.strip, value.splitlines()))
        case bool() | None:
            return
        case int() | float():
            yield json.dumps(value)
        case list():
            yield from (text for inner in value for text in _texts(inner))
        case _:
            yield from (text for pair in value.items() for inner in pair for text in _texts(inner))


# -------------------------------------------------------------------------------------------------- forms

_IN_FULL = "Parameters in full, as a JSON schema: "


def _forms(function: Function) -> Iterator[Function]:
    """Yield forms of a function, from the function itself to its name and a description that tells all."""
    filled = _filled(function)
    described = {**filled, "parameters": _described(filled["parameters"])}
    forms: list[Function] = []
    for form in (function, filled, described):
        forms += [form] if form not in forms else []
    yield from forms
    if not isinstance(function.get("parameters"), dict):
        return
    schema = json.dumps(function["parameters"], ensure_ascii=False)
    in_full: Function = {"description": f"{function.get('description') or ''} {_IN_FULL}{schema}".lstrip()}
    yield from ({**form, **in_full} for form in forms)
    yield {**described, **in_full, "parameters": _plain(described["parameters"])}
    yield {**described, **in_full, "parameters": dict(_NO_ARGUMENTS)}


def _filled(function: Function) -> Function:
    parameters = function.get("parameters")
    given = parameters if isinstance(parameters, dict) else {}
    return {
        **function,
        "description": function.get("description") or "",
        "parameters": {**_NO_ARGUMENTS, "required": [], **given},
    }


def _described(schema: Json) -> Json:
    """Return the schema with a description, empty if need be, for each argument at any depth."""
    return _with_arguments(
        schema, lambda argument: _described({**argument, "description": argument.get("description") or ""})
    )


def _plain(schema: Json) -> Json:
    """Return the schema with nothing but a type and a description for each argument."""
    return _with_arguments(
        schema,
        lambda argument: {"type": _plain_type(argument), "description": argument.get("description") or ""},
    )


def _with_arguments(schema: Json, change: Callable[[dict[str, Json]], Json]) -> Json:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(properties, dict):
        return schema
    changed: dict[str, Json] = {
        name: change(inner) if isinstance(inner, dict) else change({}) for name, inner in properties.items()
    }
    return {**schema, "properties": changed}


def _plain_type(schema: Mapping[str, Json]) -> str:
    """Return the first type that the schema allows, beside null."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    kinds = schema.get("type")
    if kinds is None and isinstance(alternatives, list):
        kinds = [alternative.get("type") for alternative in alternatives if isinstance(alternative, dict)]
    known = kinds if isinstance(kinds, list) else [kinds]
    return next((kind for kind in known if isinstance(kind, str) and kind != "null"), "string")
