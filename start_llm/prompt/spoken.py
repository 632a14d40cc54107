"""Thoughts that a client sends back in the text of a reply, between the marks that the model wrote."""

from __future__ import annotations

from dataclasses import replace

from start_llm.core.chat import Message
from start_llm.core.family import ThoughtMarks


def thought_apart(message: Message, marks: ThoughtMarks | None) -> Message:
    """The message with the thought that its text begins with where thoughts belong: for comparing alone.

    What the model reads stays as it was sent. A message that says nothing else is compared as a whole.
    """
    text = message.content.lstrip()
    if message.role != "assistant" or message.reasoning or not marks or not text.startswith(marks.opening):
        return message
    thought, _, answer = text.removeprefix(marks.opening).partition(marks.closing)
    if not thought.strip() or not (answer.strip() or message.tool_calls) or marks.closing not in text:
        return message
    return replace(message, content=answer, reasoning=thought)
