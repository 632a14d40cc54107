"""What a client sends back of thoughts: in the text of a reply, or as what was taken for one."""

from __future__ import annotations

from dataclasses import replace

from start_llm.core.chat import Message
from start_llm.core.family import ThoughtMarks


def without_assumed_thought(message: Message) -> Message:
    """A thought that is the answer too was none: nothing closed it, and the client was told both."""
    is_assumed = message.reasoning and message.reasoning.strip() == message.content.strip()
    return replace(message, reasoning=None) if is_assumed else message


def thought_apart(message: Message, marks: ThoughtMarks | None) -> Message:
    """The message with the thought that its text begins with where thoughts belong: for comparing alone.

    What the model reads stays as it was sent. A message that says nothing else is compared as a whole.
    """
    if message.role != "assistant" or message.reasoning or not marks:
        return message
    text = message.content.lstrip()
    if not text.startswith(marks.opening):
        return message
    thought, _, answer = text.removeprefix(marks.opening).partition(marks.closing)
    if not thought.strip() or not (answer.strip() or message.tool_calls) or marks.closing not in text:
        return message
    return replace(message, content=answer, reasoning=thought)


def with_thought(message: Message, marks: ThoughtMarks | None, thought: str) -> Message:
    """The message with another thought, in the place where it has its own."""
    if marks is None or thought_apart(message, marks) is message:
        return replace(message, reasoning=thought)
    before, opening, rest = message.content.partition(marks.opening)
    _, closing, answer = rest.partition(marks.closing)
    return replace(message, content=f"{before}{opening}{thought}{closing}{answer}")
