"""Custom tools: their calls have one text instead of arguments, which may have to follow a grammar.

The model knows such a tool as a function with one argument.
"""

from __future__ import annotations

from collections.abc import Mapping

from start_llm.core.chat import CUSTOM_ARGUMENT, Json, TextGrammar
from start_llm.protocols.fields import Fields, parse_embedded

_PARAMETERS: Mapping[str, Json] = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}
_SYNTAX_NAMES = {"lark": "Lark grammar", "regex": "regular expression"}


def custom_schema(tool: Fields) -> dict[str, Json]:
    """Return the function's schema for the model, without the name. Its description has the grammar."""
    grammar = custom_grammar(tool)
    texts = [tool.text("description"), grammar and _about(grammar)]
    description = "\n\n".join(filter(None, texts))
    told: dict[str, Json] = {"description": description} if description else {}
    return {**told, "parameters": dict(_PARAMETERS)}


def custom_grammar(tool: Fields) -> TextGrammar | None:
    """Return the grammar of a tool's text, if it has one. Chat completions nest it one object deeper.

    Raises:
        InvalidRequest: names the field of a format that is none.
    """
    form = tool.object("format")
    if form is None or form.text("type") in (None, "text"):
        return None
    if form.value("type") != "grammar":
        raise form.fail("type", f"is {form.value('type')!r}; it must be text or grammar")
    holder = form.object("grammar") or form
    syntax, definition = holder.required_text("syntax"), holder.required_text("definition")
    if syntax not in ("lark", "regex"):
        raise holder.fail("syntax", f"is {syntax!r}; it must be lark or regex")
    field = holder.path_of("definition")
    return TextGrammar(tool=tool.required_text("name"), syntax=syntax, definition=definition, field=field)


def _about(grammar: TextGrammar) -> str:
    return f"Its input is a text that follows this {_SYNTAX_NAMES[grammar.syntax]}:\n{grammar.definition}"


def custom_arguments(call: Fields) -> Mapping[str, Json]:
    """Return the arguments of a call that a client sends back."""
    return {CUSTOM_ARGUMENT: call.text("input") or ""}


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a call, also of a cut one. Other arguments are the text."""
    for text in (arguments, f'{arguments}"}}'):
        parsed = parse_embedded(text)
        said = parsed.get(CUSTOM_ARGUMENT) if isinstance(parsed, dict) else None
        if isinstance(said, str):
            return said
    return arguments
