"""Which thoughts a template shows."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from start_llm.core.canonical import thought_digest
from start_llm.core.chat import Message
from start_llm.core.family import ThoughtMarks
from start_llm.prompt.render import RenderedText
from start_llm.prompt.spoken import thought_apart, with_thought

_SHORT = 64
"""Characters of a thought that the template's own words could be."""

_NAME = re.compile(r"named[0-9a-f]{32}x\d+x")

type Words = Callable[[Sequence[Message]], str]


def shown_thoughts(
    messages: Sequence[Message], text: RenderedText, marks: ThoughtMarks | None, words: Words
) -> list[bytes | None]:
    """For each message the digest of its thought, if that stands in its place in the text.

    Another text there may have the same words. Then the template is asked once more, with thoughts that
    nobody else has.

    Args:
        text: the prompt of these messages.
        marks: of thoughts that begin the text of a message; None: what stands there is no thought.
        words: what the prompt would say with other messages.
    """
    apart = [thought_apart(message, marks) for message in messages]
    found = _found(apart, text)
    if None in found:
        unsure = [index for index, is_shown in enumerate(found) if is_shown is None]
        names = dict(zip(unsure, _names(len(unsure), text.whole), strict=True))
        named = set(_NAME.findall(words(_with_thoughts(messages, marks, names))))
        found = [
            names[index] in named if is_shown is None else is_shown for index, is_shown in enumerate(found)
        ]
    return [
        thought_digest(message.reasoning) if is_shown else None
        for message, is_shown in zip(apart, found, strict=True)
    ]


def _found(messages: Sequence[Message], text: RenderedText) -> list[bool | None]:
    """For each message whether the words of its thought stand in its place; None: others may say them too."""
    found: list[bool | None] = [False] * len(messages)
    for index, message in enumerate(messages):
        thought = message.reasoning and message.reasoning.strip()
        if thought:
            found[index] = _is_found(thought, index, messages, text)
    return found


def _is_found(thought: str, index: int, messages: Sequence[Message], text: RenderedText) -> bool | None:
    at = bisect_left(text.places, index, key=lambda place: place.message)
    before, start = text.places[at - 1] if at else (-1, 0)
    last, end = text.places[at] if at < len(text.places) else (len(messages) - 1, None)
    if text.whole.find(thought, start, end) < 0:
        return False
    others = (*messages[before + 1 : index], *messages[index + 1 : last + 1])
    others = (*others, replace(messages[index], reasoning=None))
    return None if len(thought) < _SHORT or _is_said(thought, others) else True


def _is_said(thought: str, messages: Sequence[Message]) -> bool:
    """Some text of these messages has the words of the thought, as a text or as JSON."""
    escaped = json.dumps(thought, ensure_ascii=False)[1:-1]
    texts = (
        [one.content, one.reasoning, *([call.name, dict(call.arguments)] for call in one.tool_calls)]
        for one in messages
    )
    written = [json.dumps(parts, ensure_ascii=False) for parts in texts]
    return any(form in text for text in written for form in (thought, escaped))


def _names(count: int, text: str) -> list[str]:
    """So many words that stand nowhere in the text."""
    begins = "named" + hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return [f"{begins}x{number}x" for number in range(count)]


def _with_thoughts(
    messages: Sequence[Message], marks: ThoughtMarks | None, thoughts: Mapping[int, str]
) -> list[Message]:
    return [
        with_thought(message, marks, thoughts[index]) if index in thoughts else message
        for index, message in enumerate(messages)
    ]
