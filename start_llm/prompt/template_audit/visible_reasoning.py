"""Finds out which reasoning a rendering shows."""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from start_llm.core.chat import Message
from start_llm.core.family import ReasoningMarks
from start_llm.prompt.inline_reasoning import split_inline_reasoning, with_reasoning
from start_llm.prompt.render import RenderedText

_SHORT = 64
"""Number of characters below which the template's own words might equal the reasoning."""

_NAME = re.compile(r"named[0-9a-f]{32}x\d+x")

type Words = Callable[[Sequence[Message]], str]


def shown_reasoning(
    messages: Sequence[Message], text: RenderedText, marks: ReasoningMarks | None, words: Words
) -> list[bool]:
    """Return for each message whether the rendering shows its reasoning.

    If another text could have produced the same words, render once more with unique words as the reasoning.

    Args:
        text: the prompt of these messages.
        marks: marks of reasoning at the start of a message's text; None: such text is not reasoning.
        words: renders the prompt with other messages.
    """
    apart = [split_inline_reasoning(message, marks) for message in messages]
    visible = _visible(apart, text)
    if None in visible:
        unsure = [index for index, is_shown in enumerate(visible) if is_shown is None]
        names = dict(zip(unsure, _names(len(unsure), text.whole), strict=True))
        named = set(_NAME.findall(words(_with_reasoning(messages, marks, names))))
        return [
            names[index] in named if is_shown is None else is_shown for index, is_shown in enumerate(visible)
        ]
    return list(map(bool, visible))


def _visible(messages: Sequence[Message], text: RenderedText) -> list[bool | None]:
    """Return for each message whether its reasoning is shown; None: other texts may have the same words."""
    visible: list[bool | None] = [False] * len(messages)
    for index, message in enumerate(messages):
        reasoning = message.reasoning and message.reasoning.strip()
        if reasoning:
            visible[index] = _is_visible(reasoning, index, messages, text)
    return visible


def _is_visible(reasoning: str, index: int, messages: Sequence[Message], text: RenderedText) -> bool | None:
    at = bisect_left(text.places, index, key=lambda place: place.message)
    before, start = text.places[at - 1] if at else (-1, 0)
    last, end = text.places[at] if at < len(text.places) else (len(messages) - 1, None)
    if text.whole.find(reasoning, start, end) < 0:
        return False
    others = (*messages[before + 1 : index], *messages[index + 1 : last + 1])
    others = (*others, replace(messages[index], reasoning=None))
    return None if len(reasoning) < _SHORT or _occurs_in(reasoning, others) else True


def _occurs_in(reasoning: str, messages: Sequence[Message]) -> bool:
    """Return whether a text of these messages contains the reasoning, plain or escaped as JSON."""
    escaped = json.dumps(reasoning, ensure_ascii=False)[1:-1]
    texts = (
        [
            message.content,
            message.reasoning,
            *([call.name, dict(call.arguments)] for call in message.tool_calls),
        ]
        for message in messages
    )
    written = [json.dumps(parts, ensure_ascii=False) for parts in texts]
    return any(form in text for text in written for form in (reasoning, escaped))


def _names(count: int, text: str) -> list[str]:
    """Return `count` words that do not occur in the text."""
    begins = "named" + hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return [f"{begins}x{number}x" for number in range(count)]


def _with_reasoning(
    messages: Sequence[Message], marks: ReasoningMarks | None, reasoning_texts: Mapping[int, str]
) -> list[Message]:
    return [
        with_reasoning(message, marks, reasoning_texts[index]) if index in reasoning_texts else message
        for index, message in enumerate(messages)
    ]
