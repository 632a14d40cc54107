"""The grammar of a whole reply: a thought if the model wants one, then what the request demands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.chat import OutputForm
from start_llm.core.family import Family
from start_llm.formats.registry import native
from start_llm.formats.writing.call_text import JsonArguments
from start_llm.formats.writing.lark import Grammar, Lark, Origin
from start_llm.formats.writing.offered import Offered

_ASIDE = "<|channel|>analysis<|message|>"
_FINAL = "<|channel|>final<|message|>"
_NEXT = "<|end|><|start|>assistant"
_CALLED = "<|call|>"
_MOST_ASIDES = 8
_BREAKS = r"\n{1,3}"
"""Between a thought and what follows, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a reply follows on.

    Attributes:
        template: the model's chat template.
        thought_is_open: the prompt ends inside a thought.
        thinking: a thought may be opened.
        begins_with_space: the tokenizer marks the start of a text with a space that is not content.
    """

    family: Family
    template: str
    thought_is_open: bool
    thinking: bool
    begins_with_space: bool


def reply_grammar(form: OutputForm, tools: Sequence[Offered], scene: Scene, lark: Lark) -> Grammar:
    """The grammar of a reply of this form.

    Args:
        form: one that is enforced.
        tools: that may be called.

    Raises:
        InvalidRequest: the model's notation of calls cannot say an argument that a tool requires.
    """
    if scene.family.channels:
        return lark.grammar(_channels(form, tools, scene, lark))
    space = '" "? ' if scene.begins_with_space else ""
    return lark.grammar(f"{space}{_thought(scene, lark)} {_behind_thought(form, tools, scene, lark)}")


def _thought(scene: Scene, lark: Lark) -> str:
    marks = scene.family.thought
    if marks is None or not (scene.thought_is_open or scene.thinking):
        return ""
    thought = f"{lark.until(marks.closing)} {lark.pattern(_BREAKS)}?"
    if scene.thought_is_open:
        return thought
    return f"({lark.literal(marks.opening)} {thought})?"


def _behind_thought(form: OutputForm, tools: Sequence[Offered], scene: Scene, lark: Lark) -> str:
    ways = _answers(form, scene, lark) if form.answer else []
    if tools:
        text = native(scene.family.formats, scene.template)
        ways.append(text.expression(lark, tools, one_call=form.one_call))
    return lark.either(*ways)


def _answers(form: OutputForm, scene: Scene, lark: Lark) -> list[str]:
    """An answer between marks, as models of this family write it, or by itself."""
    answer = _answer(form, lark)
    pairs = scene.family.around_answer
    around = [pair for pair in pairs if pair[0] in scene.template] or pairs
    between = (f"{lark.literal(before)} {answer} {lark.literal(behind)}" for before, behind in around)
    return [answer, *between]


def _answer(form: OutputForm, lark: Lark) -> str:
    if form.answer is None:
        raise ValueError("an answer in any words needs no grammar")
    origin = Origin(form.answer.field, "the schema")
    return lark.schema(form.answer.schema, origin, lenient=False)


def _channels(form: OutputForm, tools: Sequence[Offered], scene: Scene, lark: Lark) -> str:
    """Messages with headers, the first one without its `<|start|>assistant`. One call ends the reply."""
    ways = [f"{lark.literal(_FINAL)} {_answer(form, lark)}"] if form.answer else []
    ways += [_message_of_call(tool, lark) for tool in tools]
    said = lark.either(*ways)
    aside = f"{lark.until(_NEXT)}"
    if scene.thought_is_open:
        return f"{aside} {said}"
    if not scene.thinking:
        return said
    return f"({lark.literal(_ASIDE)} {aside}){{0,{_MOST_ASIDES}}} {said}"


def _message_of_call(tool: Offered, lark: Lark) -> str:
    to = f"to=functions.{tool.name}"
    constrained = "<|constrain|>json" if lark.is_control("<|constrain|>") else "json"
    header = lark.either(
        lark.literal(f"<|channel|>commentary {to} {constrained}<|message|>"),
        lark.literal(f" {to}<|channel|>commentary json<|message|>"),
    )
    return f"{header} {JsonArguments().expression(lark, tool)}"
