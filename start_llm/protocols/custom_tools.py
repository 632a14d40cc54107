"""Custom tools: their calls have one text instead of arguments, which may have to follow a grammar.

The model knows such a tool as a function with one argument.
"""

from collections.abc import Mapping
from typing import Literal

import regex

from start_llm.core.chat import CUSTOM_ARGUMENT, Json, TextGrammar
from start_llm.protocols.fields import Fields, parse_embedded

_PARAMETERS: Mapping[str, Json] = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}
_HEAD = regex.compile(rf'\s*+\{{\s*+"{CUSTOM_ARGUMENT}"\s*+:\s*+"')
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_CHARACTERS = regex.compile(
    rf'(?:[^"\\]++|\\[^u]|(?!{_HIGH})\\u{_HEX}{{4}}|{_HIGH}(?:{_LOW}|(?=[^\\]|\\[^u]|(?!{_LOW})\\u{_HEX}{{4}})))*+'
)
"""Characters of a JSON text, the two halves of one as one."""
_ESCAPE = regex.compile(rf"{_HIGH}{_LOW}|\\u{_HEX}{{4}}|\\.", regex.DOTALL)
_SYNTAX_NAMES = {"lark": "Lark grammar", "regex": "regular expression"}


def custom_schema(tool: Fields) -> dict[str, Json]:
    """Return the function's schema for the model, without the name. Its description has the grammar."""
    grammar = custom_grammar(tool)
    texts = [tool.text("description"), grammar and _about(grammar)]
    description = "\n\n".join(filter(None, texts))
    schema: dict[str, Json] = {"description": description} if description else {}
    return {**schema, "parameters": dict(_PARAMETERS)}


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


class CustomInput:
    """Reads the text of a call from its arguments as they come. A state machine without I/O.

    Arguments of another form than `{"input": "…"}` are the text themselves, once they are whole.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._rest = ""
        self._step: Literal["head", "text", "over", "other"] = "head"

    def feed(self, arguments: str) -> str:
        """Return the text that is certain with more of the arguments."""
        if self._step in ("head", "other"):
            self._arguments.append(arguments)
        self._rest += "" if self._step in ("other", "over") else arguments
        if self._step == "head":
            self._read_head()
        return self._text() if self._step == "text" else ""

    def finish(self) -> str:
        """Return the rest of the text, when the arguments have ended or were cut."""
        if self._step not in ("head", "other"):
            return ""
        arguments = "".join(self._arguments)
        parsed = parse_embedded(arguments)
        text = parsed.get(CUSTOM_ARGUMENT) if isinstance(parsed, dict) else None
        return text if isinstance(text, str) else arguments

    def _read_head(self) -> None:
        head = _HEAD.match(self._rest, partial=True)
        if head is None:
            self._step, self._rest = "other", ""
        elif not head.partial:
            self._step, self._rest = "text", self._rest[head.end() :]

    def _text(self) -> str:
        """Take the characters of the JSON text that are whole."""
        ready = _CHARACTERS.match(self._rest)
        end = ready.end() if ready else 0
        written, self._rest = self._rest[:end], self._rest[end:]
        if self._rest.startswith('"'):
            self._step = "over"
        return _ESCAPE.sub(lambda escape: _unescaped(escape[0]), written)


def _unescaped(escape: str) -> str:
    """Return the character of an escape in JSON; what is none stays as it was written."""
    character = parse_embedded(f'"{escape}"')
    return character if isinstance(character, str) else escape


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a call, also of a cut one. Other arguments are the text."""
    reader = CustomInput()
    return reader.feed(arguments) + reader.finish()
