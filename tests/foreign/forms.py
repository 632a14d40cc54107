"""A conversation, and how each protocol sends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

type Json = dict[str, Any]

READ: Json = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["a", "b"]}},
    "required": ["path"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Call:
    """One of the tool `read`, with the id that the client received."""

    id: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A question, a reply, or the result of the call `of`.

    Attributes:
        thought: of a reply, as its protocol sends it, with the seal that it has in some.
    """

    role: Literal["user", "assistant", "tool"]
    text: str
    calls: tuple[Call, ...] = ()
    of: str = ""
    thought: Json = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, whatever its protocol.

    Attributes:
        system: its text.
        named: fields of the body, and `headers`, that say which conversation this is.
        calls: the reply has to be a call.
        has_tools: the tool is offered.
        options: other fields of the body.
    """

    system: str
    messages: Sequence[Message]
    length: int
    temperature: float
    calls: bool
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    has_tools: bool = True
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Form:
    """A protocol.

    Attributes:
        body: of a request.
        reply: what a client keeps of the answer.
        thought: the text of a thought; another one in its place, if it is given, while the seal stays.
        computed: tokens of the prompt that were, as the answer's usage says.
    """

    path: str
    body: Callable[[Request], Json]
    reply: Callable[[Json], Message]
    computed: Callable[[Json], int]
    thought: Callable[[Json], str]
    edited: Callable[[Json, str], Json]


def _arguments(call: Call) -> Json:
    return json.loads(call.arguments)


# ------------------------------------------------------------------------------------------------------- chat


def _chat(request: Request) -> Json:
    tool = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": READ}}
    return {
        "messages": [
            *([{"role": "system", "content": request.system}] if request.system else []),
            *map(_in_chat, request.messages),
        ],
        **(
            {"tools": [tool], "tool_choice": "required" if request.calls else "none"}
            if request.has_tools
            else {}
        ),
        **request.options,
        "max_tokens": request.length,
        "temperature": request.temperature,
        **request.named,
    }


def _in_chat(message: Message) -> Json:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": "read", "arguments": call.arguments}}
        for call in message.calls
    ]
    sent: Json = {"role": message.role, "content": message.text, **message.thought}
    return (
        sent | ({"tool_calls": calls} if calls else {}) | ({"tool_call_id": message.of} if message.of else {})
    )


def _chat_reply(answer: Json) -> Message:
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    parsed = tuple(Call(call["id"], call["function"]["arguments"]) for call in calls)
    thought = {name: message[name] for name in ("reasoning_content",) if message.get(name)}
    return Message("assistant", message["content"] or "", parsed, thought=thought)


# --------------------------------------------------------------------------------------------------- messages


def _messages(request: Request) -> Json:
    return {
        **({"system": request.system} if request.system else {}),
        "messages": [*map(_in_messages, request.messages)],
        **(
            {
                "tools": [{"name": "read", "description": "Reads.", "input_schema": READ}],
                "tool_choice": {"type": "any" if request.calls else "none"},
            }
            if request.has_tools
            else {}
        ),
        **request.options,
        "max_tokens": request.length,
        "temperature": request.temperature,
        # As Claude Code names its sessions.
        **({"metadata": {"user_id": json.dumps(dict(request.named))}} if request.named else {}),
    }


def _in_messages(message: Message) -> Json:
    if message.of:
        block = {"type": "tool_result", "tool_use_id": message.of, "content": message.text}
        return {"role": "user", "content": [block]}
    text = [{"type": "text", "text": message.text}] if message.text.strip() else []
    uses = [
        {"type": "tool_use", "id": call.id, "name": "read", "input": _arguments(call)}
        for call in message.calls
    ]
    thoughts = [message.thought] if message.thought else []
    return {"role": message.role, "content": [*thoughts, *text, *uses]}


def _message_reply(answer: Json) -> Message:
    blocks = answer["content"]
    calls = [Call(row["id"], json.dumps(row["input"])) for row in blocks if row["type"] == "tool_use"]
    thought = next((row for row in blocks if row["type"] == "thinking"), {})
    return Message("assistant", "".join(row.get("text", "") for row in blocks), tuple(calls), thought=thought)


# -------------------------------------------------------------------------------------------------- responses


def _responses(request: Request) -> Json:
    return {
        **({"instructions": request.system} if request.system else {}),
        "input": [item for message in request.messages for item in _items(message)],
        **(
            {
                "tools": [{"type": "function", "name": "read", "description": "Reads.", "parameters": READ}],
                "tool_choice": "required" if request.calls else "none",
            }
            if request.has_tools
            else {}
        ),
        **request.options,
        "max_output_tokens": request.length,
        "temperature": request.temperature,
        "store": False,
        **({"metadata": dict(request.named)} if request.named else {}),
    }


def _items(message: Message) -> list[Json]:
    if message.of:
        return [{"type": "function_call_output", "call_id": message.of, "output": message.text}]
    text = [{"role": message.role, "content": message.text}] if message.text.strip() else []
    calls = [
        {"type": "function_call", "call_id": call.id, "name": "read", "arguments": call.arguments}
        for call in message.calls
    ]
    return [*([message.thought] if message.thought else []), *text, *calls]


def _response_reply(answer: Json) -> Message:
    items = answer["output"]
    calls = [Call(call["call_id"], call["arguments"]) for call in items if call["type"] == "function_call"]
    messages = [item for item in items if item["type"] == "message"]
    text = "".join(part.get("text", "") for item in messages for part in item.get("content") or [])
    thought = next((item for item in items if item["type"] == "reasoning"), {})
    return Message("assistant", text, tuple(calls), thought=thought)


def _parts_of(item: Json) -> list[Json]:
    return item.get("content") or item.get("summary") or []


def _computed(usage: Json, prompt: str, details: str) -> int:
    return usage[prompt] - usage[details]["cached_tokens"]


FORMS = {
    "chat": Form(
        "/v1/chat/completions",
        _chat,
        _chat_reply,
        lambda answer: _computed(answer["usage"], "prompt_tokens", "prompt_tokens_details"),
        lambda thought: thought["reasoning_content"],
        lambda _, text: {"reasoning_content": text},
    ),
    "messages": Form(
        "/v1/messages",
        _messages,
        _message_reply,
        lambda answer: answer["usage"]["input_tokens"],
        lambda thought: thought["thinking"],
        lambda thought, text: {**thought, "thinking": text},
    ),
    "responses": Form(
        "/v1/responses",
        _responses,
        _response_reply,
        lambda answer: _computed(answer["usage"], "input_tokens", "input_tokens_details"),
        lambda thought: "".join(part["text"] for part in _parts_of(thought)),
        lambda thought, text: {
            **thought,
            "content": [{"type": "reasoning_text", "text": text}],
            "summary": [],
        },
    ),
}
