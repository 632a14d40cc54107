"""Conversations of real clients, as they were recorded: every request of theirs, and what they were answered.

The files in `echoes/` keep the form of what was sent: which fields there are, in which order, what is null,
empty or left out, texts or parts, ids, metadata. Texts are our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from start_llm.core.chat import ChatRequest
from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output, Reasoning
from start_llm.core.ids import name_in
from start_llm.protocols.anthropic import messages as anthropic_messages
from start_llm.protocols.base import ModelFacts, Parser, RequestContext
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai import chat_completions as openai_chat
from start_llm.protocols.responses import create as openai_responses
from start_llm.protocols.seal import KEY_BYTES, Seal
from tests.model_cards import model_card

_FOLDER = Path(__file__).with_name("echoes")
_CONTEXT = RequestContext(
    ModelFacts(model_card("local-model"), lambda _: b""),
    b"",
    Seal(bytes(KEY_BYTES)),
)

type Body = Mapping[str, Any]
type Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and what the client received."""

    request: ChatRequest
    reply: tuple[Output, ...]


def recordings() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def raw_recording(name: str) -> dict[str, Any]:
    """The file itself: its protocol, the tools of each request, and the exchanges with headers and bodies."""
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@cache
def recording(name: str) -> list[Exchange]:
    data = raw_recording(name)
    read = partial(parsed, data["protocol"])
    requests = [read({**raw["request"], "tools": data["tools"]}, raw["headers"]) for raw in data["exchanges"]]
    later = [*requests[1:], None]
    return [
        Exchange(request, tuple(_outputs(raw["reply"], _ids_of(following, len(request.messages)))))
        for raw, request, following in zip(data["exchanges"], requests, later, strict=True)
    ]


def _ids_of(following: ChatRequest | None, before: int) -> list[str]:
    """The ids that the calls of a reply were sent with, as the next request has them.

    Args:
        before: messages of the request that was replied to.
    """
    after = following.messages[before - 1 :] if following else ()
    replies = [message for message in after if message.role == "assistant" and message.tool_calls]
    return [name_in(call.id) for call in replies[0].tool_calls] if replies else []


def _outputs(parts: Sequence[Body], ids: Sequence[str]) -> Iterator[Output]:
    calls = 0
    for part in parts:
        if "reasoned" in part:
            yield Reasoning(text=part["reasoned"])
        elif "text" in part:
            yield Content(text=part["text"])
        else:
            begun = CallStarted(index=calls, name=part["call"])
            yield replace(begun, id=ids[calls]) if calls < len(ids) else begun
            yield CallArguments(index=calls, text=part["arguments"])
            yield CallEnded(index=calls)
            calls += 1


def parsed(protocol: str, body: Body, headers: Headers) -> ChatRequest:
    """A request as the server reads it."""
    request = _PROTOCOLS[protocol](Fields(dict(body)), headers, _CONTEXT).request
    assert isinstance(request, ChatRequest)
    return request


_PROTOCOLS: Mapping[str, Parser] = {
    "chat": openai_chat.parse,
    "messages": anthropic_messages.parse,
    "responses": openai_responses.parse,
}
