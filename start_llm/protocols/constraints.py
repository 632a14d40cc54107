"""Reads output constraints of OpenAI's protocols: `tool_choice`, `response_format`, `text.format`.

For requests that demand a tool of OpenAI's servers, the reply says that it is unavailable: the model would
invent its results.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from start_llm.core.chat import JsonAnswer, OutputConstraint
from start_llm.protocols.base import ParsedRequest, RequestContext
from start_llm.protocols.fields import Fields
from start_llm.protocols.tool_types import unavailable_text

_ALLOWED = "allowed_tools"


def tools_elsewhere(
    body: Fields, names: Collection[str], runs_elsewhere: Callable[[Fields], bool]
) -> list[str]:
    """Return the types of the request's tools that OpenAI runs.

    Args:
        names: the tools that the model may call; a type that is one of them is not meant.
    """
    kinds = [tool.required_text("type") for tool in body.objects("tools") if runs_elsewhere(tool)]
    return [kind for kind in kinds if kind not in names]


def allowed_tools(choice: Fields) -> tuple[Fields, str]:
    """Return what has the allowed tools and their mode. Chat completions nest it one object deeper.

    Raises:
        InvalidRequest: an unknown mode.
    """
    allowed = choice.object(_ALLOWED) or choice
    mode = allowed.text("mode") or "auto"
    if mode not in ("auto", "required"):
        raise allowed.fail("mode", f"is {mode!r}; it must be 'auto' or 'required'")
    return allowed, mode


def demanded_tool(body: Fields, names: Collection[str], elsewhere: Sequence[str]) -> str | None:
    """Return the type of a tool that must be called and that OpenAI runs; None without such a demand.

    Args:
        names: the tools that the model may call.
    """
    value = body.value("tool_choice")
    if not isinstance(value, dict):
        return elsewhere[0] if value == "required" and elsewhere and not names else None
    choice = Fields(value, "tool_choice")
    choice_kind = choice.value("type")
    if choice_kind != _ALLOWED:
        return choice_kind if isinstance(choice_kind, str) and choice_kind in elsewhere else None
    allowed, mode = allowed_tools(choice)
    kinds = [tool.value("type") for tool in allowed.objects("tools")]
    demanded = [kind for kind in kinds if isinstance(kind, str) and kind in elsewhere]
    return demanded[0] if mode == "required" and demanded and len(demanded) == len(kinds) else None


def answered_elsewhere(parsed: ParsedRequest, demanded: str | None, context: RequestContext) -> ParsedRequest:
    """Return the request with words in place of the model's reply, if one with such a tool is demanded."""
    if demanded is None or parsed.request.options.is_prewarm:
        return parsed
    context.notices.tell(f"The tool {demanded!r} runs on OpenAI's servers: it is answered as unavailable.")
    return replace(parsed, unavailable=unavailable_text(demanded, "OpenAI"))


_CHOICE = "tool_choice"
_WORDS = {
    "auto": OutputConstraint(),
    "none": OutputConstraint(calls="none"),
    "required": OutputConstraint(calls="must"),
}

type NameOf = Callable[[Fields], str | None]
"""Returns the name that the model has for a chosen tool; None for kinds of tools that it cannot call."""


def read_form(
    body: Fields,
    names: Collection[str],
    *,
    answer: JsonAnswer | None,
    name_of: NameOf,
    elsewhere: Collection[str] = (),
) -> OutputConstraint:
    """Return the output constraint.

    Args:
        names: names of the offered tools.
        answer: the constraint on the answer, read from another field.
        name_of: returns the model's name for a chosen tool in this protocol.
        elsewhere: types of the request's tools that the vendor runs; a choice of these demands no call here.

    Raises:
        InvalidRequest: names an unknown choice, or a tool that is not offered.
    """
    one_call = not body.boolean("parallel_tool_calls", default=True)
    choice = _choice(body, names, name_of, elsewhere)
    return replace(choice, answer=answer, one_call=one_call)


def _choice(
    body: Fields, names: Collection[str], name_of: NameOf, elsewhere: Collection[str]
) -> OutputConstraint:
    value = body.value(_CHOICE)
    if isinstance(value, str):
        if value not in _WORDS:
            raise body.fail(_CHOICE, f"is {value!r}; it must be one of {', '.join(_WORDS)}, or name a tool")
        return _WORDS["auto" if elsewhere and not names and value == "required" else value]
    if value is not None and not isinstance(value, dict):
        raise body.expected(_CHOICE, "a string or an object")
    choice = body.object(_CHOICE)
    if choice is None:
        return OutputConstraint()
    if choice.value("type") == "allowed_tools":
        return _allowed(choice, names, name_of, elsewhere)
    if choice.value("type") in elsewhere:
        return OutputConstraint()
    return OutputConstraint(calls="must", tools=frozenset([_offered(choice, names, name_of)]))


def _allowed(
    choice: Fields, names: Collection[str], name_of: NameOf, elsewhere: Collection[str]
) -> OutputConstraint:
    """Read allowed tools, without those that the vendor runs."""
    allowed, mode = allowed_tools(choice)
    chosen = [tool for tool in allowed.objects("tools") if tool.value("type") not in elsewhere]
    tools = frozenset(_offered(tool, names, name_of) for tool in chosen)
    if elsewhere and not tools:
        return OutputConstraint(calls="none")
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
            holder = form.required_object(nested) if nested else form
            schema = holder.required_object("schema")
            return JsonAnswer(schema=schema.data, field=schema.path, is_strict=holder.boolean("strict"))
        case other:
            raise form.fail("type", f"is {other!r}; it must be text, json_object or json_schema")
