"""Finds out which reasoning a rendering shows."""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
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
    visible = [_is_visible(index, apart, text) for index in range(len(apart))]
    if None in visible:
        begins = (
            "named" + hashlib.blake2b(text.whole.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        )
        names = {index: f"{begins}x{index}x" for index, is_shown in enumerate(visible) if is_shown is None}
        renamed = [
            with_reasoning(message, marks, names[index]) if index in names else message
            for index, message in enumerate(messages)
        ]
        named = set(_NAME.findall(words(renamed)))
        return [
            names[index] in named if is_shown is None else is_shown for index, is_shown in enumerate(visible)
        ]
    return list(map(bool, visible))


def _is_visible(index: int, messages: Sequence[Message], text: RenderedText) -> bool | None:
    """Return whether a message's reasoning is shown; None: other texts may have the same words."""
    reasoning = (messages[index].reasoning or "").strip()
    at = bisect_left(text.places, index, key=lambda place: place.message)
    before, start = text.places[at - 1] if at else (-1, 0)
    last, end = text.places[at] if at < len(text.places) else (len(messages) - 1, None)
    if not reasoning or text.whole.find(reasoning, start, end) < 0:
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
