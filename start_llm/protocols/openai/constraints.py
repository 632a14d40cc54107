"""Reads output constraints of OpenAI's protocols: `tool_choice`, `response_format`, `text.format`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from start_llm.core.chat import JsonAnswer, OutputConstraint
from start_llm.protocols.fields import Fields

_CHOICE = "tool_choice"
_WORDS = {
    "auto": OutputConstraint(),
    "none": OutputConstraint(calls="none"),
    "required": OutputConstraint(calls="must"),
}

type NameOf = Callable[[Fields], str | None]
"""Returns the name that the model has for a chosen tool; None for kinds of tools that it cannot call."""


def read_form(
    body: Fields, names: Collection[str], *, answer: JsonAnswer | None, name_of: NameOf
) -> OutputConstraint:
    """Return the output constraint.

    Args:
        names: names of the offered tools.
        answer: the constraint on the answer, read from another field.
        name_of: returns the model's name for a chosen tool in this protocol.

    Raises:
        InvalidRequest: names an unknown choice, or a tool that is not offered.
    """
    one_call = not body.boolean("parallel_tool_calls", default=True)
    return replace(_choice(body, names, name_of), answer=answer, one_call=one_call)


def _choice(body: Fields, names: Collection[str], name_of: NameOf) -> OutputConstraint:
    value = body.value(_CHOICE)
    if isinstance(value, str):
        if value not in _WORDS:
            raise body.fail(_CHOICE, f"is {value!r}; it must be one of {', '.join(_WORDS)}, or name a tool")
        return _WORDS[value]
    if value is not None and not isinstance(value, dict):
        raise body.expected(_CHOICE, "a string or an object")
    choice = body.object(_CHOICE)
    if choice is None:
        return OutputConstraint()
    if choice.value("type") == "allowed_tools":
        return _allowed(choice, names, name_of)
    return OutputConstraint(calls="must", tools=frozenset([_offered(choice, names, name_of)]))


def _allowed(choice: Fields, names: Collection[str], name_of: NameOf) -> OutputConstraint:
    """Read allowed tools. Chat completions nest mode and tools one object deeper than responses."""
    allowed = choice.object("allowed_tools") or choice
    mode = allowed.text("mode") or "auto"
    if mode not in ("auto", "required"):
        raise allowed.fail("mode", f"is {mode!r}; it must be 'auto' or 'required'")
    tools = frozenset(_offered(tool, names, name_of) for tool in allowed.objects("tools"))
    return OutputConstraint(calls="must" if mode == "required" else "may", tools=tools)


def _offered(tool: Fields, names: Collection[str], name_of: NameOf) -> str:
    name = name_of(tool)
    if name is None:
        raise tool.fail("type", f"is {tool.value('type')!r}, and the model has no such tools")
    if name not in names:
        raise tool.fail("name", f"is {name!r}, and no such tool is offered")
    return name


def read_answer(form: Fields | None, *, nested: str | None) -> JsonAnswer | None:
    """Read the format of an answer.

    Args:
        nested: the member that contains name and schema; None if they are beside the type.

    Raises:
        InvalidRequest: names an unknown type, or a format without a schema.
    """
    if form is None:
        return None
    match form.required_text("type"):
        case "text":
            return None
        case "json_object":
            schema = form.object("schema")  # as llama.cpp has it
            if schema is not None:
                return JsonAnswer(schema=schema.data, field=schema.path)
            return JsonAnswer(schema={"type": "object"}, field=form.path)
        case "json_schema":
            return _schema(form.object(nested) if nested else form, form, nested)
        case other:
            raise form.fail("type", f"is {other!r}; it must be text, json_object or json_schema")


def _schema(holder: Fields | None, form: Fields, nested: str | None) -> JsonAnswer:
    if holder is None:
        raise form.fail(nested or "schema", "is required and must be an object")
    schema = holder.object("schema")
    if schema is None:
        raise holder.fail("schema", "is required and must be an object")
    return JsonAnswer(schema=schema.data, field=schema.path)
