"""How each format writes its calls. Whatever is written here, the reader of that format reads as calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.output.grammar.arguments import ArgumentTags, Offered, TaggedArguments
from start_llm.output.grammar.gemma4 import gemma_arguments
from start_llm.output.grammar.lark import Lark
from start_llm.output.tool_calls.schema import COMPOSING

type WriteArguments = Callable[[Lark, Offered], str]

_UNLISTED = COMPOSING | {"patternProperties"}
_NUMBER = "[0-9]{1,3}"
_MOST_CALLS = 32


def object_arguments(lark: Lark, tool: Offered) -> str:
    """A JSON object, and never null. A schema that only lists arguments is taken for the whole list."""
    is_list = _UNLISTED.isdisjoint(tool.parameters)
    closed: dict[str, Json] = {"additionalProperties": False} if is_list else {}
    stated = tool.parameters.get("type", "object")
    kind: Json = "object" if isinstance(stated, list) and "object" in stated else stated
    return lark.schema({**closed, **tool.parameters, "type": kind}, tool.origin, lenient=True)


def _tagged(tags: ArgumentTags) -> WriteArguments:
    return lambda lark, tool: TaggedArguments(lark, tags, tool).expression()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """The text of calls, as the authors' templates have it.

    Attributes:
        mark: what a chat template has in it that shows calls in this form.
        head: in front of the arguments, with `NAME` for the tool and `NUMBER` for any number.
        tail: behind them.
        before, between, after: in front of all calls, between two of them, behind all.
    """

    mark: str
    head: str
    tail: str
    arguments: WriteArguments = object_arguments
    before: str = ""
    between: str = ""
    after: str = ""

    def expression(self, lark: Lark, tools: Sequence[Offered], *, one_call: bool) -> str:
        call = lark.either(*(self._call(lark, tool) for tool in tools))
        between = lark.literal(self.between)
        more = "" if one_call else f"({between} {call}){{0,{_MOST_CALLS - 1}}}"
        return " ".join(filter(None, [lark.literal(self.before), call, more, lark.literal(self.after)]))

    def _arguments(self, lark: Lark, tool: Offered) -> str:
        try:
            return self.arguments(lark, tool)
        except RecursionError as error:
            problem = f"'tools': {tool.origin.about} are nested too deeply."
            raise InvalidRequest(problem, param=tool.origin.field) from error

    def _call(self, lark: Lark, tool: Offered) -> str:
        parts = [lark.literal(part.replace("NAME", tool.name)) for part in self.head.split("NUMBER")]
        head = f" {lark.pattern(_NUMBER)} ".join(parts)
        parts = [head, self._arguments(lark, tool), lark.literal(self.tail)]
        return " ".join(filter(None, parts))


CALL_TEXTS: Mapping[str, CallText] = {
    "hermes": CallText(
        mark="<tool_call>",
        head='<tool_call>\n{"name": "NAME", "arguments": ',
        tail="}\n</tool_call>",
        between="\n",
    ),
    "qwen_xml": CallText(
        mark="<function=",
        head="<tool_call>\n<function=NAME>\n",
        tail="</function>\n</tool_call>",
        arguments=_tagged(
            ArgumentTags(key="<parameter=KEY>", padding="\n", value_end="</parameter>", behind="\n")
        ),
        between="\n",
    ),
    "glm": CallText(
        mark="<arg_key>",
        head="<tool_call>NAME\n",
        tail="</tool_call>",
        arguments=_tagged(
            ArgumentTags(key="<arg_key>KEY</arg_key>\n<arg_value>", value_end="</arg_value>", behind="\n")
        ),
        between="\n",
    ),
    "minicpm": CallText(
        mark='<function name="',
        head='<function name="NAME">',
        tail="</function>",
        arguments=_tagged(
            ArgumentTags(key='<param name="KEY">', value_end="</param>", wrapper=("<![CDATA[", "]]>"))
        ),
        between="\n",
    ),
    "gemma4": CallText(
        mark="<|tool_call>", head="<|tool_call>call:NAME", tail="<tool_call|>", arguments=gemma_arguments
    ),
    "mistral_headed": CallText(mark="[ARGS]", head="[TOOL_CALLS]NAME[ARGS]", tail=""),
    "mistral_list": CallText(
        mark="[TOOL_CALLS]",
        before="[TOOL_CALLS][",
        head='{"name": "NAME", "arguments": ',
        tail="}",
        between=", ",
        after="]",
    ),
    "kimi": CallText(
        mark="<|tool_call_begin|>",
        before="<|tool_calls_section_begin|>",
        head="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        after="<|tool_calls_section_end|>",
    ),
    "llama_tagged": CallText(mark="<function=", head="<function=NAME>", tail="</function>"),
    "llama_bare": CallText(mark="", head='{"name": "NAME", "parameters": ', tail="}", between="; "),
}
"""By the names of `output.tool_calls.FORMATS`, but for what models write by mistake."""

_USUAL = "hermes"


def native(formats: Sequence[str], template: str) -> CallText:
    """How a model calls: as its template shows it, else as its family does, else as most do."""
    known = [CALL_TEXTS[name] for name in formats if name in CALL_TEXTS] or [CALL_TEXTS[_USUAL]]
    return next((text for text in known if text.mark and text.mark in template), known[0])
