"""Handles reasoning that a client sends back in a reply's text, or an answer that was taken for reasoning."""

from dataclasses import replace

from start_llm.core.chat import Message
from start_llm.core.family import ReasoningMarks


def without_assumed_reasoning(message: Message) -> Message:
    """Drop reasoning that equals the answer: no mark closed it, so the client received the text as both."""
    is_assumed = message.reasoning and message.reasoning.strip() == message.content.strip()
    return replace(message, reasoning=None) if is_assumed else message


def split_inline_reasoning(message: Message, marks: ReasoningMarks | None) -> Message:
    """Move reasoning at the beginning of a reply's text to `reasoning`, for comparisons only.

    The model reads the message as it was sent. A message with nothing but reasoning is compared as a whole.
    """
    if message.role != "assistant" or message.reasoning or not marks:
        return message
    text = message.content.lstrip()
    if not text.startswith(marks.opening):
        return message
    reasoning, _, answer = text.removeprefix(marks.opening).partition(marks.closing)
    if not reasoning.strip() or not (answer.strip() or message.tool_calls) or marks.closing not in text:
        return message
    return replace(message, content=answer, reasoning=reasoning)


def with_reasoning(message: Message, marks: ReasoningMarks | None, reasoning: str) -> Message:
    """Replace the reasoning of a message in the place where it has it."""
    if marks is None or split_inline_reasoning(message, marks) is message:
        return replace(message, reasoning=reasoning)
    before, opening, rest = message.content.partition(marks.opening)
    _, closing, answer = rest.partition(marks.closing)
    return replace(message, content=f"{before}{opening}{reasoning}{closing}{answer}")
