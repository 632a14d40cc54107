"""Reads output constraints of the Messages protocol: `tool_choice`, `output_config.format`."""

from __future__ import annotations

from start_llm.core.chat import JsonAnswer, OutputConstraint
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai.chat_input import ToolSchemas, tool_names

_OLDER_NAME = "output_format"


def read_form(body: Fields, tools: ToolSchemas) -> OutputConstraint:
    """Return the output constraint. Unknown kinds of choice or format are ignored.

    Raises:
        InvalidRequest: names a chosen tool that is not offered, or a format without a schema.
    """
    choice = body.object("tool_choice")
    answer = _answer(body)
    if choice is None or not tools:
        return OutputConstraint(answer=answer)
    one_call = choice.boolean("disable_parallel_tool_use")
    match choice.text("type"):
        case "none":
            return OutputConstraint(answer=answer, calls="none")
        case "any":
            return OutputConstraint(answer=answer, calls="must", one_call=one_call)
        case "tool" if not _runs_elsewhere(body, choice, tools):
            chosen = frozenset([_chosen(choice, tools)])
            return OutputConstraint(answer=answer, calls="must", tools=chosen, one_call=one_call)
        case _:
            return OutputConstraint(answer=answer, one_call=one_call)


def _runs_elsewhere(body: Fields, choice: Fields, tools: ToolSchemas) -> bool:
    """Return True if the required tool is one of Anthropic's server tools, which cannot be called here."""
    name = choice.text("name")
    return name not in tool_names(tools) and any(tool.value("name") == name for tool in body.objects("tools"))


def _chosen(choice: Fields, tools: ToolSchemas) -> str:
    name = choice.required_text("name")
    if name not in tool_names(tools):
        raise choice.fail("name", f"is {name!r}, and no such tool is offered")
    return name


def _answer(body: Fields) -> JsonAnswer | None:
    """Read the answer's schema. The older field is from a beta; if both are set, the newer one counts."""
    config = body.object("output_config")
    form = (config.object("format") if config else None) or body.object(_OLDER_NAME)
    if form is None or form.text("type") != "json_schema":
        return None
    schema = form.object("schema")
    if schema is None:
        raise form.fail("schema", "is required and must be an object")
    return JsonAnswer(schema=schema.data, field=schema.path)
