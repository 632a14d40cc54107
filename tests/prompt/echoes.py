"""A reply as it is read, and as clients send it back."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from start_llm.core.chat import Json, Message, ToolCall
from start_llm.core.events import Finished, Text, Usage
from start_llm.core.prompt import Prompt
from start_llm.formats.reading.schema import Tools
from start_llm.output.splitter import make_splitter
from start_llm.output.stream import OutputStream
from tests.prompt.fakes import family_of, reply
from tests.prompt.replies import TOOLS, Answer, answer_of


def chunks(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def read(trait: str, prompt: Prompt, reply: str, size: int) -> Answer:
    """Feeds the text in pieces through the splitter that the service would make."""
    splitter = make_splitter(
        family_of(trait),
        Tools(TOOLS),
        reasoning_is_open=prompt.reasoning_is_open,
        thinking=prompt.thinking,
    )
    stream = OutputStream(splitter)
    events = [event for piece in chunks(reply, size) for event in stream.feed(Text(piece, (0,)))]
    rest, end = stream.close(Finished("stop", Usage(1, 0, len(reply))))
    return answer_of([*events, *rest], end)


def understood(trait: str, prompt: Prompt, reply: str) -> Answer:
    """The same for every way to cut the text."""
    answers = [read(trait, prompt, reply, size) for size in (1, 2, 7, len(reply) + 1)]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@dataclass(frozen=True)
class Client:
    """The changes that a client makes to a reply before it comes back.

    Attributes:
        id_of: its name for call number n.
        reads: arguments, from JSON text.
    """

    keeps_reasoning: bool
    id_of: Callable[[int], str]
    reads: Callable[[str], Mapping[str, Json]]

    def echo(self, answer: Answer) -> Message:
        calls = [
            ToolCall(self.id_of(index), name, self.reads(arguments))
            for index, (name, arguments) in enumerate(answer.calls)
        ]
        # White space alone is dropped.
        content = answer.content if answer.content.strip() else ""
        reasoning = answer.reasoning or None if self.keeps_reasoning else None
        return reply(content, *calls, reasoning=reasoning)

    def expected(self, message: Message) -> Message:
        """The message itself, in the same words."""
        calls = [
            replace(call, arguments=self.reads(json.dumps(call.arguments))) for call in message.tool_calls
        ]
        return replace(
            message, tool_calls=tuple(calls), reasoning=message.reasoning if self.keeps_reasoning else None
        )


def compact(arguments: str) -> Mapping[str, Json]:
    """Written again by JavaScript, where 1000.0 is 1000."""
    return json.loads(json.dumps(_without_points(json.loads(arguments)), separators=(",", ":")))


def _without_points(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_without_points(item) for item in value]
        case dict():
            return {key: _without_points(item) for key, item in value.items()}
        case _:
            return value


def escaped(arguments: str) -> Mapping[str, Json]:
    return json.loads(json.dumps(json.loads(arguments), ensure_ascii=True))


CLIENTS = {
    "claude, pi": Client(True, lambda index: f"toolu_{index:04}", compact),
    "codex": Client(True, lambda index: f"call_{index}", json.loads),
    "openclaw": Client(False, lambda index: f"calla8c{index}", compact),
    "litellm": Client(True, lambda index: f"chatcmpl-tool-{index}", escaped),
}
