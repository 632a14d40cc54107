"""What a model writes, taken from its template, and what a client is told of it."""

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
THOUGHT_FORMS: Mapping[str, str] = {
    "strips_old_thoughts": "<think>\n{}\n</think>\n\n",
    "opens_thought": "{}\n</think>\n\n",
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
    "text_behind_calls": "<|channel>thought\n{}\n<channel|>",
    "thought_or_answer": "<think>\n{}\n</think>\n\n",
    "cuts_at_closing_mark": "<think>\n{}\n</think>\n\n",
    "thought_without_text": "<think>\n{}\n</think>\n\n",
}
"""How the models that think write a thought in front of an answer, behind their prompt."""
OPENED: Mapping[str, tuple[str, str]] = {
    "opens_thought": ("\n", "</think>"),
    "stop_opens_next": ("<think>", "</think>"),
    "minimax": ("<think>\n", ""),
    "open_and_close": ("<|open|>think<|sep|>", ""),
    "nested_arguments": ("<mm:think>", "</mm:think>"),
    "dsml": ("<think>", "</think>"),
    "words_in_system": ("\n", "</think>"),
}
"""What the prompt has for a thought that it opens, and what the history has in place of one that it drops."""
EMPTY: Mapping[str, str] = {
    "strips_old_thoughts": "<think>\n\n</think>\n\n",
    "effort_words": "<think>\n\n</think>\n\n",
    "gemma4_channel": "<|channel>thought\n<channel|>",
    "minimax": "<think>\n\n</think>\n\n",
    "open_and_close": "<|open|>think<|sep|><|close|>think<|sep|>",
}
"""What the prompt has for a thought that must not be, and the history has not."""


class NoEndError(Exception):
    """The reply has no end in the rendering, or does not begin where the prompt ends."""


@dataclass(frozen=True)
class Turn:
    """A prompt, and what the model writes behind it."""

    prompt: Prompt
    said: str


def next_messages(message: Message) -> tuple[Message, ...]:
    """What a client sends with a reply: the results of its calls, or the next question."""
    results = [result(f"{index} m", one.id) for index, one in enumerate(message.tool_calls)]
    return tuple(results) or (user("And there?"),)


def turn(trait: str, message: Message, *, on: bool, talk: tuple[Message, ...] = ASKED) -> Turn:
    """The reply is the end of the conversation, or the next message tells where it ends.

    Only what stands behind the message in front of it counts: further up, thoughts may have been dropped.
    """
    request: dict[str, Any] = {"tools": TOOLS, "thinking": Thinking(on=on)}
    prompt = prepared(trait, *talk, **request)
    for following in ((), next_messages(message)):
        history = prepared(trait, *talk, message, *following, **request)
        end = ends_of(history).get(len(talk))
        if end is not None:
            shared = ends_of(prompt).keys() & ends_of(history).keys() & {len(talk) - 1}
            start, behind = (ends_of(one)[len(talk) - 1] if shared else 0 for one in (prompt, history))
            before = text_of(trait, prompt.tokens.ids[start:])
            written = text_of(trait, history.tokens.ids[behind:end])
            return Turn(prompt, written_behind(trait, before, written, message.reasoning))
    raise NoEndError


def ends_of(prompt: Prompt) -> dict[int, int]:
    return {boundary.message: boundary.tokens for boundary in prompt.boundaries}


def written_behind(trait: str, prompt: str, written: str, thought: str | None) -> str:
    """The reply as the model writes it; a thought that the history drops stands in front of it."""
    form = THOUGHT_FORMS.get(trait, "")
    if written.startswith(prompt):
        said = written.removeprefix(prompt)
        return form.format(thought) + said if thought and thought not in said else said
    opening, closing = OPENED.get(trait, (EMPTY.get(trait, ""), ""))
    head = prompt.removesuffix(opening)
    if not written.startswith(head):
        raise NoEndError
    said = written.removeprefix(head).removeprefix(closing)
    return form.format(thought or "") + said if trait in OPENED or thought else said


@dataclass(frozen=True)
class Answer:
    """What the events of a reply say."""

    thought: str
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
        thought="".join(event.text for event in events if isinstance(event, Reasoning)),
        content="".join(event.text for event in events if isinstance(event, Content)),
        calls=tuple(zip(names, arguments, strict=True)),
        reason=end.reason,
    )
