"""How a model writes its calls: their text, and a grammar of that. All of it is read as calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.formats.reading.json_text import written
from start_llm.formats.reading.schema import COMPOSING
from start_llm.formats.writing.lark import Lark
from start_llm.formats.writing.offered import Offered

type Arguments = Mapping[str, Json]

_UNLISTED = COMPOSING | {"patternProperties"}
_NUMBER = "[0-9]{1,3}"
_MOST_CALLS = 32


class ArgumentText(Protocol):
    """How the arguments of a call are written."""

    def write(self, arguments: Arguments) -> str:
        """The text of these arguments."""
        ...

    def expression(self, lark: Lark, tool: Offered) -> str:
        """A grammar for the arguments of a tool.

        Raises:
            InvalidRequest: a required argument has no form here.
        """
        ...


class JsonArguments:
    """The arguments are a JSON object."""

    def write(self, arguments: Arguments) -> str:
        return written(dict(arguments))

    def expression(self, lark: Lark, tool: Offered) -> str:
        """An object, and never null. A schema that only lists arguments is taken for the whole list."""
        is_list = _UNLISTED.isdisjoint(tool.parameters)
        closed: dict[str, Json] = {"additionalProperties": False} if is_list else {}
        stated = tool.parameters.get("type", "object")
        kind: Json = "object" if isinstance(stated, list) and "object" in stated else stated
        return lark.schema({**closed, **tool.parameters, "type": kind}, tool.origin, lenient=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """The text of calls, as the authors' templates have it.

    Attributes:
        mark: what a chat template has in it that shows calls in this form.
        head: in front of the arguments, with `NAME` for the tool and `NUMBER` for the number of the call.
        first: the number of the first call.
        tail: behind them.
        before, between, after: in front of all calls, between two of them, behind all.
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
        """The text of these calls, each a name with its arguments."""
        numbered = enumerate(calls, self.first)
        texts = (self._written(name, arguments, number) for number, (name, arguments) in numbered)
        return f"{self.before}{self.between.join(texts)}{self.after}"

    def _written(self, name: str, arguments: Arguments, number: int) -> str:
        head = self.head.replace("NUMBER", str(number)).replace("NAME", name)
        return f"{head}{self.arguments.write(arguments)}{self.tail}"

    def expression(self, lark: Lark, tools: Sequence[Offered], *, one_call: bool) -> str:
        """A grammar for one or more calls of these tools."""
        call = lark.either(*(self._call(lark, tool) for tool in tools))
        between = lark.literal(self.between)
        more = "" if one_call else f"({between} {call}){{0,{_MOST_CALLS - 1}}}"
        return " ".join(filter(None, [lark.literal(self.before), call, more, lark.literal(self.after)]))

    def _call(self, lark: Lark, tool: Offered) -> str:
        parts = [lark.literal(part.replace("NAME", tool.name)) for part in self.head.split("NUMBER")]
        head = f" {lark.pattern(_NUMBER)} ".join(parts)
        return " ".join(filter(None, [head, self._arguments(lark, tool), lark.literal(self.tail)]))

    def _arguments(self, lark: Lark, tool: Offered) -> str:
        try:
            return self.arguments.expression(lark, tool)
        except RecursionError as error:
            problem = f"'tools': {tool.origin.about} are nested too deeply."
            raise InvalidRequest(problem, param=tool.origin.field) from error
