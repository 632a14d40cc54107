"""Builds the grammar of a whole reply: optional reasoning, then the output that the request requires."""

from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.chat import OutputConstraint
from start_llm.core.family import Family
from start_llm.formats.registry import preferred_call_text
from start_llm.formats.writing.call_text import JsonArguments
from start_llm.formats.writing.callable_tool import CallableTool
from start_llm.formats.writing.lark import Grammar, Lark, SchemaOrigin

_ASIDE = "<|channel|>analysis<|message|>"
_FINAL = "<|channel|>final<|message|>"
_NEXT = "<|end|><|start|>assistant"
_CALLED = "<|call|>"
_MAX_ASIDES = 8
_BREAKS = r"\n{1,3}"
"""Line breaks that may follow reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyContext:
    """The state of the prompt and the model that the grammar of a reply depends on.

    Attributes:
        template: the model's chat template.
        reasoning_is_open: the prompt ends inside reasoning.
        thinking: the model may open reasoning.
        begins_with_space: the tokenizer marks the start of a text with a space that is not content.
    """

    family: Family
    template: str
    reasoning_is_open: bool
    thinking: bool
    begins_with_space: bool


def reply_grammar(
    form: OutputConstraint, tools: Sequence[CallableTool], reply_context: ReplyContext, lark: Lark
) -> Grammar:
    """Return the grammar of a reply that satisfies this constraint.

    Args:
        form: an enforced constraint.
        tools: the tools that the reply may call.

    Raises:
        InvalidRequest: the model's call notation cannot express an argument that a tool requires.
    """
    if reply_context.family.channels:
        return lark.grammar(_channels(form, tools, reply_context, lark))
    space = '" "? ' if reply_context.begins_with_space else ""
    return lark.grammar(
        f"{space}{_reasoning(reply_context, lark)} {_after_reasoning(form, tools, reply_context, lark)}"
    )


def _reasoning(reply_context: ReplyContext, lark: Lark) -> str:
    marks = reply_context.family.reasoning
    if marks is None or not (reply_context.reasoning_is_open or reply_context.thinking):
        return ""
    reasoning = f"{lark.until(marks.closing)} {lark.pattern(_BREAKS)}?"
    if reply_context.reasoning_is_open:
        return reasoning
    return f"({lark.literal(marks.opening)} {reasoning})?"


def _after_reasoning(
    form: OutputConstraint, tools: Sequence[CallableTool], reply_context: ReplyContext, lark: Lark
) -> str:
    ways = _answers(form, reply_context, lark) if form.answer else []
    if tools:
        text = preferred_call_text(reply_context.family.formats, reply_context.template)
        ways.append(text.expression(lark, tools, one_call=form.one_call))
    return lark.either(*ways)


def _answers(form: OutputConstraint, reply_context: ReplyContext, lark: Lark) -> list[str]:
    """Return the alternatives for an answer: bare, or between the marks that models of this family write."""
    answer = _answer(form, lark)
    pairs = reply_context.family.around_answer
    around = [pair for pair in pairs if pair[0] in reply_context.template] or pairs
    between = (f"{lark.literal(before)} {answer} {lark.literal(after)}" for before, after in around)
    return [answer, *between]


def _answer(form: OutputConstraint, lark: Lark) -> str:
    if form.answer is None:
        raise ValueError("an answer in any words needs no grammar")
    origin = SchemaOrigin(form.answer.field, "the schema")
    return lark.schema(form.answer.schema, origin, lenient=not form.answer.is_strict)


def _channels(
    form: OutputConstraint, tools: Sequence[CallableTool], reply_context: ReplyContext, lark: Lark
) -> str:
    """Build messages with headers; the first one lacks its `<|start|>assistant`. One call ends the reply."""
    ways = [f"{lark.literal(_FINAL)} {_answer(form, lark)}"] if form.answer else []
    ways += [_message_of_call(tool, lark) for tool in tools]
    reply = lark.either(*ways)
    aside = f"{lark.until(_NEXT)}"
    if reply_context.reasoning_is_open:
        return f"{aside} {reply}"
    if not reply_context.thinking:
        return reply
    return f"({lark.literal(_ASIDE)} {aside}){{0,{_MAX_ASIDES}}} {reply}"


def _message_of_call(tool: CallableTool, lark: Lark) -> str:
    to = f"to=functions.{tool.name}"
    constrained = "<|constrain|>json" if lark.is_control("<|constrain|>") else "json"
    header = lark.either(
        lark.literal(f"<|channel|>commentary {to} {constrained}<|message|>"),
        lark.literal(f" {to}<|channel|>commentary json<|message|>"),
    )
    return f"{header} {JsonArguments().expression(lark, tool)}"
