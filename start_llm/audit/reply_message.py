"""Rebuild a reply message from its events, as a client does."""

import json
from collections.abc import Sequence

from start_llm.core.chat import Message, ToolCall
from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Event, Output, Reasoning


def message_from_events(events: Sequence[Event | Output]) -> Message:
    """Return the reply as the client will send it back. A call without its end event is left out."""
    begun = {event.index: event for event in events if isinstance(event, CallStarted)}
    calls: list[ToolCall] = []
    for index in (event.index for event in events if isinstance(event, CallEnded)):
        parts = [piece.text for piece in events if isinstance(piece, CallArguments) and piece.index == index]
        calls.append(ToolCall(f"call_{begun[index].id}", begun[index].name, json.loads("".join(parts))))
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return Message(
        role="assistant",
        content=content if content.strip() else "",
        reasoning=reasoning or None,
        tool_calls=tuple(calls),
    )
