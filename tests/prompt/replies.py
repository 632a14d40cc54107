"""Texts that a model writes, taken from its template, and the events that a client hears for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from start_llm.core.chat import Message, Thinking
from start_llm.core.events import CallArguments, CallStarted, Content, Finished, Output, Reasoning
from start_llm.core.prompt import Prompt
from tests.prompt.fakes import function, prepared, result, system, text_of, user

TOOLS = (
    function(
        "write",
        path={"type": "string"},
        text={"type": "string"},
        count={"type": "integer"},
        ratio={"type": "number"},
        deep={"type": "object"},
        lines={"type": "array"},
        flag={"type": "boolean"},
        maybe={"type": ["string", "null"]},
    ),
    function("now"),
)
ASKED = (system("Be brief."), user("How deep is it?"))
REASONING_FORMS: Mapping[str, str] = {
    "strips_old_reasoning": "<think>\n{}\n</think>\n\n",
    "opens_reasoning": "{}\n</think>\n\n",
    "stop_opens_next": "{}</think>",
    "words_in_system": "{}\n</think>\n\n",
    "effort_words": "<think>\n{}\n</think>\n\n",
    "channels": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
    "gemma4_channel": "<|channel>thought\n{}\n<channel|>",
    "arguments_as_text": "<think>\n{}\n</think>\n\n",
    "minimax": "{}\n</think>\n\n",
    "nested_arguments": "{}</mm:think>",
    "dsml": "{}</think>",
    "seed": "<seed:think>{}</seed:think>",
    "numbered_actions": "<|START_THINKING|>{}<|END_THINKING|>",
    "open_and_close": "{}<|close|>think<|sep|>",
    "strict_channels": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
    "text_after_calls": "<|channel>thought\n{}\n<channel|>",
    "reasoning_or_answer": "<think>\n{}\n</think>\n\n",
    "cuts_at_closing_mark": "<think>\n{}\n</think>\n\n",
    "reasoning_without_text": "<think>\n{}\n</think>\n\n",
    "answer_as_reasoning": "<think>\n{}\n</think>\n\n",
}
"""How the models that think write reasoning before an answer, after their prompt."""
OPENED: Mapping[str, tuple[str, str]] = {
    "opens_reasoning": ("\n", "</think>"),
    "stop_opens_next": ("<think>", "</think>"),
    "minimax": ("<think>\n", ""),
    "open_and_close": ("<|open|>think<|sep|>", ""),
    "nested_arguments": ("<mm:think>", "</mm:think>"),
    "dsml": ("<think>", "</think>"),
    "words_in_system": ("\n", "</think>"),
}
"""The prompt's opening of reasoning, and the text that stands in the history for dropped reasoning."""
EMPTY: Mapping[str, str] = {
    "strips_old_reasoning": "<think>\n\n</think>\n\n",
    "effort_words": "<think>\n\n</think>\n\n",
    "gemma4_channel": "<|channel>thought\n<channel|>",
    "minimax": "<think>\n\n</think>\n\n",
    "open_and_close": "<|open|>think<|sep|><|close|>think<|sep|>",
}
"""The prompt's text for reasoning that must not be, and the history has not."""


class NoEndError(Exception):
    """The reply has no end in the rendering, or does not begin where the prompt ends."""


@dataclass(frozen=True)
class Turn:
    """A prompt, and what the model writes after it."""

    prompt: Prompt
    reply: str


def next_messages(message: Message) -> tuple[Message, ...]:
    """Return the messages that follow a reply: the results of its calls, or the next question."""
    results = [result(f"{index} m", call.id) for index, call in enumerate(message.tool_calls)]
    return tuple(results) or (user("And there?"),)


def turn(trait: str, message: Message, *, on: bool, talk: tuple[Message, ...] = ASKED) -> Turn:
    """The reply is the end of the conversation, or the next message tells where it ends.

    Only what stands after the message before it counts: further up, reasoning may have been dropped.
    """
    request: dict[str, Any] = {"tools": TOOLS, "thinking": Thinking(on=on)}
    prompt = prepared(trait, *talk, **request)
    for following in ((), next_messages(message)):
        history = prepared(trait, *talk, message, *following, **request)
        end = ends_of(history).get(len(talk))
        if end is not None:
            shared = ends_of(prompt).keys() & ends_of(history).keys() & {len(talk) - 1}
            start, after = (ends_of(version)[len(talk) - 1] if shared else 0 for version in (prompt, history))
            before = text_of(trait, prompt.tokens.ids[start:])
            written = text_of(trait, history.tokens.ids[after:end])
            return Turn(prompt, written_after(trait, before, written, message.reasoning))
    raise NoEndError


def ends_of(prompt: Prompt) -> dict[int, int]:
    return {boundary.message: boundary.tokens for boundary in prompt.boundaries}


def written_after(trait: str, prompt: str, written: str, reasoning: str | None) -> str:
    """The reply as the model writes it; reasoning that the history drops stands before it."""
    form = REASONING_FORMS.get(trait, "")
    if written.startswith(prompt):
        text = written.removeprefix(prompt)
        return form.format(reasoning) + text if reasoning and reasoning not in text else text
    opening, closing = OPENED.get(trait, (EMPTY.get(trait, ""), ""))
    head = prompt.removesuffix(opening)
    if not written.startswith(head):
        raise NoEndError
    text = written.removeprefix(head).removeprefix(closing)
    return form.format(reasoning or "") + text if trait in OPENED or reasoning else text


@dataclass(frozen=True)
class Answer:
    """The content of a reply's events."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    reason: str


def answer_of(events: list[Output], end: Finished) -> Answer:
    names = [event.name for event in events if isinstance(event, CallStarted)]
    arguments = [
        "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == index)
        for index in range(len(names))
    ]
    return Answer(
        reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
        content="".join(event.text for event in events if isinstance(event, Content)),
        calls=tuple(zip(names, arguments, strict=True)),
        reason=end.reason,
    )
