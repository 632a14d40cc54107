"""Conversations of real clients, as they were recorded: every request of theirs, and what they were answered.

The files in `echoes/` keep the form of what was sent: which fields there are, in which order, what is null,
empty or left out, texts or parts, ids, metadata. Texts are our own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from start_llm.core.chat import ChatRequest, Message, ToolCall
from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output, Reasoning
from start_llm.protocols import anthropic_messages, openai_chat
from start_llm.protocols.base import Context, ModelFacts
from start_llm.protocols.fields import Fields
from start_llm.protocols.seal import KEY_BYTES, Seal
from start_llm.protocols.sessions import session_id

_FOLDER = Path(__file__).with_name("echoes")
_CONTEXT = Context(ModelFacts("local-model", 1000, lambda _: b""), b"", Seal(bytes(KEY_BYTES)))
_BETWEEN = "\n\n"

type Body = Mapping[str, Any]
type Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and what the client was told."""

    request: ChatRequest
    reply: tuple[Output, ...]


def recordings() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def recording(name: str) -> list[Exchange]:
    data = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    read = _PROTOCOLS[data["protocol"]]
    return [
        Exchange(
            read({**one["request"], "tools": data["tools"]}, one["headers"]), tuple(_outputs(one["reply"]))
        )
        for one in data["exchanges"]
    ]


def _outputs(parts: Sequence[Body]) -> Iterator[Output]:
    calls = 0
    for part in parts:
        if "thought" in part:
            yield Reasoning(text=part["thought"])
        elif "text" in part:
            yield Content(text=part["text"])
        else:
            yield CallStarted(index=calls, name=part["call"])
            yield CallArguments(index=calls, text=part["arguments"])
            yield CallEnded(index=calls)
            calls += 1


# ------------------------------------------------------------------------------------------- chat completions


def chat(body: Body, headers: Headers) -> ChatRequest:
    request = openai_chat.parse(Fields(dict(body)), headers, _CONTEXT).request
    assert isinstance(request, ChatRequest)
    return request


# ----------------------------------------------------------------------------------------------- /v1/messages


def messages(body: Body, headers: Headers) -> ChatRequest:
    request = anthropic_messages.parse(Fields(dict(body)), headers, _CONTEXT).request
    assert isinstance(request, ChatRequest)
    return request


# ---------------------------------------------------------------------------------------------- /v1/responses


def responses(body: Body, headers: Headers) -> ChatRequest:
    """What a parser of OpenAI's responses has to do with them, for as long as there is none.

    Items of the assistant that follow each other are one reply.
    """
    read: list[Message] = []
    for item in body["input"]:
        one = _ITEMS[item["type"]](item)
        if read and read[-1].role == one.role == "assistant":
            one = _with_more(read.pop(), one)
        read.append(one)
    functions = [tool for tool in body["tools"] if tool["type"] == "function"]
    return ChatRequest(
        messages=tuple(read),
        tools=tuple(_function(tool, tool["parameters"]) for tool in functions),
        session_id=session_id(Fields(dict(body)), headers),
    )


def _message_item(item: Body) -> Message:
    role = "system" if item["role"] == "developer" else item["role"]
    return Message(role=role, content=_joined(item["content"]))


def _reasoning_item(item: Body) -> Message:
    return Message(role="assistant", reasoning=_joined(item["content"], between=""))


def _call_item(item: Body) -> Message:
    call = ToolCall(item["call_id"], item["name"], json.loads(item["arguments"]))
    return Message(role="assistant", tool_calls=(call,))


def _output_item(item: Body) -> Message:
    return Message(role="tool", content=item["output"], tool_call_id=item["call_id"])


_ITEMS: Mapping[str, Callable[[Body], Message]] = {
    "message": _message_item,
    "reasoning": _reasoning_item,
    "function_call": _call_item,
    "function_call_output": _output_item,
}


def _with_more(reply: Message, more: Message) -> Message:
    return replace(
        reply,
        content=reply.content + more.content,
        reasoning=reply.reasoning or more.reasoning,
        tool_calls=(*reply.tool_calls, *more.tool_calls),
    )


def _joined(blocks: Sequence[Body], *, between: str = _BETWEEN) -> str:
    return between.join(block["text"] for block in blocks)


def _function(tool: Body, parameters: Body) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": dict(parameters)}
    return {"type": "function", "function": function}


_PROTOCOLS: Mapping[str, Callable[[Body, Headers], ChatRequest]] = {
    "chat": chat,
    "messages": messages,
    "responses": responses,
}
