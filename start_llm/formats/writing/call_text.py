"""Writes tool calls as text, and grammars of that text. The parsers accept everything written here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from start_llm.core.chat import CUSTOM_ARGUMENT, Json
from start_llm.core.errors import InvalidRequest
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.schema import COMPOSING
from start_llm.formats.writing.callable_tool import CallableTool
from start_llm.formats.writing.lark import Lark

type Arguments = Mapping[str, Json]

_UNLISTED = COMPOSING | {"patternProperties"}
_NUMBER = "[0-9]{1,3}"
_MAX_CALLS = 32


class ArgumentText(Protocol):
    """Writes the arguments of a call."""

    def write(self, arguments: Arguments) -> str:
        """Return the text of these arguments."""
        ...

    def expression(self, lark: Lark, tool: CallableTool) -> str:
        """Return a grammar for the arguments of a tool.

        Raises:
            InvalidRequest: the notation cannot express a required argument.
        """
        ...


class JsonArguments:
    """Writes the arguments as a JSON object."""

    def write(self, arguments: Arguments) -> str:
        return written(dict(arguments))

    def expression(self, lark: Lark, tool: CallableTool) -> str:
        """Return a grammar for an object, never null. A schema that only lists arguments allows no others."""
        if tool.grammar:
            before, after = written({CUSTOM_ARGUMENT: ""}).split('""')
            return f"{lark.literal(before)} {lark.json_text(tool.grammar)} {lark.literal(after)}"
        is_list = _UNLISTED.isdisjoint(tool.parameters)
        closed: dict[str, Json] = {"additionalProperties": False} if is_list else {}
        stated = tool.parameters.get("type", "object")
        kind: Json = "object" if isinstance(stated, list) and "object" in stated else stated
        return lark.schema({**closed, **tool.parameters, "type": kind}, tool.origin, lenient=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """The text around calls, as in the chat templates of the models' authors.

    Attributes:
        mark: text in a chat template that shows that the model uses this notation.
        head: text before the arguments, with `NAME` for the tool and `NUMBER` for the number of the call.
        tail: text after the arguments.
        before, between, after: text before all calls, between two calls, and after all calls.
    """

    mark: str
    head: str
    tail: str
    first: int = 0
    arguments: ArgumentText = field(default_factory=JsonArguments)
    before: str = ""
    between: str = ""
    after: str = ""

    def write(self, calls: Sequence[tuple[str, Arguments]]) -> str:
        """Return the text of these calls, each a name with its arguments."""
        numbered = enumerate(calls, self.first)
        texts = (self._written(name, arguments, number) for number, (name, arguments) in numbered)
        return f"{self.before}{self.between.join(texts)}{self.after}"

    def _written(self, name: str, arguments: Arguments, number: int) -> str:
        head = self.head.replace("NUMBER", str(number)).replace("NAME", name)
        return f"{head}{self.arguments.write(arguments)}{self.tail}"

    def expression(self, lark: Lark, tools: Sequence[CallableTool], *, one_call: bool) -> str:
        """Return a grammar for one or more calls of these tools."""
        call = lark.either(*(self._call(lark, tool) for tool in tools))
        between = lark.literal(self.between)
        more = "" if one_call else f"({between} {call}){{0,{_MAX_CALLS - 1}}}"
        return " ".join(filter(None, [lark.literal(self.before), call, more, lark.literal(self.after)]))

    def _call(self, lark: Lark, tool: CallableTool) -> str:
        parts = [lark.literal(part.replace("NAME", tool.name)) for part in self.head.split("NUMBER")]
        head = f" {lark.pattern(_NUMBER)} ".join(parts)
        return " ".join(filter(None, [head, self._arguments(lark, tool), lark.literal(self.tail)]))

    def _arguments(self, lark: Lark, tool: CallableTool) -> str:
        try:
            return self.arguments.expression(lark, tool)
        except RecursionError as error:
            problem = f"'tools': {tool.origin.about} are nested too deeply."
            raise InvalidRequest(problem, param=tool.origin.field) from error
