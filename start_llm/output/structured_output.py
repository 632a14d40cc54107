"""Structured output and tool choice: splitter, grammar guide and logit bias for a request."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from start_llm.core.chat import ChatRequest, Json, TextGrammar, tool_name
from start_llm.core.engine_request import Guide
from start_llm.core.errors import InvalidRequest
from start_llm.core.family import Family
from start_llm.core.prompt import Prompt
from start_llm.formats.reading.schema import Tools
from start_llm.formats.registry import NOTATIONS
from start_llm.formats.writing.callable_tool import CallableTool
from start_llm.formats.writing.lark import Lark
from start_llm.output.grammar.enforcer import Enforcer, Vocabulary, check_text_grammar
from start_llm.output.grammar.reply_grammar import ReplyContext, reply_grammar
from start_llm.output.splitter import Splitter, make_splitter

_UNLIKELY = -100.0
"""Added to the logit of an unwanted token; also the lower limit of the API's `logit_bias`."""


class StructuredOutputTokenizer(Vocabulary, Protocol):
    """The tokenizer data that structured output needs."""

    @property
    def trims_leading_space(self) -> bool: ...

    @property
    def chat_template(self) -> str: ...


class StructuredOutput:
    """Enforces the output constraints of replies.

    Constraints are not part of the prompt, so they do not affect caching.

    Args:
        vocabulary: width of the logits.
    """

    def __init__(self, tokenizer: StructuredOutputTokenizer, family: Family, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._enforcer = Enforcer(tokenizer, vocabulary)

    def splitter(self, request: ChatRequest, prompt: Prompt) -> Splitter:
        """Return the splitter for a reply. Calls of tools that may not be called remain text."""
        is_enforced = request.form.is_enforced
        tools = [tool for tool in _offered(request) if _may_be_called(request, tool)]
        return make_splitter(
            self._family,
            Tools(tools, are_all=request.form.tools is None and not is_enforced),
            reasoning_is_open=prompt.reasoning_is_open,
            thinking=prompt.thinking and not is_enforced,
            calls_come_first=is_enforced,
        )

    def guide(self, request: ChatRequest, prompt: Prompt) -> Guide | None:
        """Return the guide of a reply, or None without an enforced constraint.

        Raises:
            InvalidRequest: the constraint cannot be enforced, or a tool's grammar is none; names the field.
        """
        for grammar in request.grammars:
            check_text_grammar(grammar)
        if not request.form.is_enforced:
            return None
        reply_context = ReplyContext(
            family=self._family,
            template=self._tokenizer.chat_template,
            reasoning_is_open=prompt.reasoning_is_open,
            thinking=prompt.thinking,
            begins_with_space=self._tokenizer.trims_leading_space,
        )
        lark = Lark(self._tokenizer.control_tokens)
        return self._enforcer.guide(reply_grammar(request.form, _callable(request), reply_context, lark))

    def cut(self, request: ChatRequest) -> str:
        """Return the text that closes overlong reasoning. It opens no answer if a call must follow."""
        cut = self._family.reasoning.cut if self._family.reasoning else ""
        if not self._family.channels or request.form.calls != "must":
            return cut
        return cut[: cut.rindex("<|channel|>")]

    def bias(self, request: ChatRequest) -> Mapping[int, float]:
        """Return a bias against tokens that begin a call if calls are forbidden. Such calls would be text."""
        if request.form.calls != "none" or not _offered(request):
            return {}
        return self._opening_tokens

    @cached_property
    def _opening_tokens(self) -> Mapping[int, float]:
        openers = [opener for name in self._family.formats for opener in NOTATIONS[name].openers]
        encoded = [self._tokenizer.encode(opener, as_document=False) for opener in openers]
        return {tokens[0]: _UNLIKELY for tokens in encoded if len(tokens) == 1}


def _offered(request: ChatRequest) -> Sequence[Mapping[str, Json]]:
    return (*request.tools, *request.late_tools)


def offered_names(request: ChatRequest) -> Sequence[str]:
    """Return the names of all tools of a request."""
    return [tool_name(tool) for tool in _offered(request)]


def _may_be_called(request: ChatRequest, tool: Mapping[str, Json]) -> bool:
    form = request.form
    return form.calls != "none" and (form.tools is None or tool_name(tool) in form.tools)


def _callable(request: ChatRequest) -> list[CallableTool]:
    """Return the tools that an enforced reply may call. The model must have seen their definitions."""
    known = {name for message in request.messages for name in message.tool_references}
    shown = [*request.tools, *(tool for tool in request.late_tools if tool_name(tool) in known)]
    grammars = {grammar.tool: grammar for grammar in request.grammars}
    tools = [_read(tool, grammars.get(tool_name(tool))) for tool in shown if _may_be_called(request, tool)]
    if request.form.calls == "must" and not tools:
        raise InvalidRequest(
            "'tool_choice' demands a call, and no such tool is offered.", param="tool_choice"
        )
    return tools


def _read(tool: Mapping[str, Json], grammar: TextGrammar | None) -> CallableTool:
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, dict) else None
    return CallableTool(tool_name(tool), parameters if isinstance(parameters, dict) else {}, grammar)
