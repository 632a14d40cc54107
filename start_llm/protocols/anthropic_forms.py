"""What the Messages protocol says about the form of a reply: `tool_choice`, `output_config.format`."""

from __future__ import annotations

from start_llm.core.chat import JsonAnswer, OutputForm
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai_messages import ToolSchemas, tool_names

_OLDER_NAME = "output_format"


def read_form(body: Fields, tools: ToolSchemas) -> OutputForm:
    """The form of a reply. A kind of choice or of format that is not known asks for nothing."""
    choice = body.object("tool_choice")
    answer = _answer(body)
    if choice is None or not tools:
        return OutputForm(answer=answer)
    one_call = choice.boolean("disable_parallel_tool_use")
    match choice.text("type"):
        case "none":
            return OutputForm(answer=answer, calls="none")
        case "any":
            return OutputForm(answer=answer, calls="must", one_call=one_call)
        case "tool" if not _runs_elsewhere(body, choice, tools):
            chosen = frozenset([_chosen(choice, tools)])
            return OutputForm(answer=answer, calls="must", tools=chosen, one_call=one_call)
        case _:
            return OutputForm(answer=answer, one_call=one_call)


def _runs_elsewhere(body: Fields, choice: Fields, tools: ToolSchemas) -> bool:
    """The tool that has to be called is one of Anthropic's servers, which nothing here can call."""
    name = choice.value("name")
    return name not in tool_names(tools) and any(tool.value("name") == name for tool in body.objects("tools"))


def _chosen(choice: Fields, tools: ToolSchemas) -> str:
    name = choice.required_text("name")
    if name not in tool_names(tools):
        raise choice.fail("name", f"is {name!r}, and no such tool is offered")
    return name


def _answer(body: Fields) -> JsonAnswer | None:
    """The older field is a beta's; where both stand, the newer one counts."""
    config = body.object("output_config")
    form = (config.object("format") if config else None) or body.object(_OLDER_NAME)
    if form is None or form.text("type") != "json_schema":
        return None
    schema = form.object("schema")
    if schema is None:
        raise form.fail("schema", "is required and must be an object")
    return JsonAnswer(schema=schema.data, field=schema.path)
