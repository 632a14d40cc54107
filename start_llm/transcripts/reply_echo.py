"""Reconstructs a reply as the client will send it back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import cast

from start_llm.core.chat import Json, Message, ToolCall
from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output, Reasoning
from start_llm.core.half_characters import without_halves


@dataclass(slots=True)
class ReplyEcho:
    """A reply as the client receives it.

    Attributes:
        content: the pieces of each text; a new text begins after each call.
        calls: name and pieces of arguments by index of the call.
        ended: indices of the calls that are complete.
        ids: ids of the calls.
    """

    content: list[list[str]] = field(default_factory=lambda: [[]])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, tuple[str, list[str]]] = field(default_factory=dict[int, tuple[str, list[str]]])
    ended: set[int] = field(default_factory=set[int])
    ids: list[str] = field(default_factory=list[str])

    @classmethod
    def begun_with(cls, message: Message | None) -> ReplyEcho:
        """Return the echo of a reply that goes on from a message, if there is one: together they are one."""
        echo = cls()
        if message is not None:
            echo.content[-1].append(message.content)
            echo.reasoning += filter(None, [message.reasoning])
        return echo

    def add(self, output: Output) -> None:
        match output:
            case Content(text=text):
                self.content[-1].append(text)
            case Reasoning(text=text):
                self.reasoning.append(text)
            case CallStarted(index=index, name=name, id=call_id):
                self.calls[index] = (name, [])
                self.ids.append(call_id)
                self.content.append([])
            case CallArguments(index=index, text=text):
                self.calls[index][1].append(text)
            case CallEnded(index=index):
                self.ended.add(index)

    @property
    def was_cut_in_call(self) -> bool:
        """True if a call has begun that has not ended."""
        return len(self.ended) < len(self.calls)

    def messages(self, *, drops_calls: bool = False) -> list[Message]:
        """Return the messages that clients may send back for this reply.

        There are several if a call stood between texts: in a chat the second begins with a line break, and
        some clients insert one of their own (lesson 17). There is none if the reply is empty, or if a call
        cannot be read.

        Args:
            drops_calls: leave out incomplete calls, as clients do.
        """
        texts = ["".join(pieces) for pieces in self.content]
        spoken = [text for text in texts if text.strip()]
        joined = ["".join(texts), "\n".join(spoken), "\n\n".join(spoken)]
        messages = [self._message(content, drops_calls) for content in dict.fromkeys(joined)]
        return [message for message in messages if message is not None]

    def _message(self, content: str, drops_calls: bool) -> Message | None:
        kept = [kept for index, kept in self.calls.items() if index in self.ended or not drops_calls]
        calls = [_call(name, "".join(parts)) for name, parts in kept]
        if None in calls or not (content.strip() or calls):
            return None
        reasoning = "".join(self.reasoning)
        # Text that was read as reasoning until the reply ended without a closing mark was sent as the answer
        # too.
        is_assumed = reasoning.strip() == content.strip()
        return Message(
            role="assistant",
            content=content,
            reasoning=None if is_assumed else reasoning or None,
            tool_calls=tuple(call for call in calls if call is not None),
        )


def _call(name: str, arguments: str) -> ToolCall | None:
    """Parse a call as a request's is parsed; None if the arguments are not a JSON object."""
    try:
        parsed = without_halves(cast("Json", json.loads(arguments or "{}")))
    except (ValueError, RecursionError):
        return None
    return ToolCall("", name, parsed) if isinstance(parsed, dict) else None
