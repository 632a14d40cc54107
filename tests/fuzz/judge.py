"""Judge a reply, whatever was asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.fuzz.bodies import Expected
from tests.fuzz.requests import Request
from tests.grammar import completions, messages, responses, wire
from tests.server.client import Reply

_ERROR_MEMBERS = {"message", "type", "param", "code"}
_READERS = {
    "/v1/messages": messages.read,
    "/v1/responses": responses.read,
    "/responses": responses.read,
}


def judge(asked: Request, reply: Reply) -> None:
    """Raise one of `wire.COMPLAINTS` if the reply is not what a client may rely on."""
    if reply.status == 503:
        assert reply.headers["retry-after"].isdigit()
        assert not asked.is_normal, "a normal request is turned away"
    assert reply.status < 500 or reply.status == 503
    assert reply.status == 200 or not asked.is_normal
    if asked.method == "HEAD" or not reply.body:
        assert asked.method == "HEAD", "no body"
        return
    if _path(asked) == "/metrics" and reply.status == 200:
        assert list(text_string_to_metric_families(reply.body.decode()))
        return
    if reply.headers["content-type"].startswith("text/event-stream"):
        body = _streamed(asked, reply)
    else:
        body = strict(reply.body)
        _check_refusal(asked, reply.status, body)
    if asked.expected:
        assert words_of(body) == asked.expected


def _path(asked: Request) -> str:
    return asked.target.partition("?")[0].rstrip("/")


def _streamed(asked: Request, reply: Reply) -> Any:
    read = _READERS.get(_path(asked), completions.read)
    content = read(list(wire.events_in(reply.body)))
    assert content.failure is None, content.failure
    return content.body


def strict(body: bytes) -> Any:
    """JSON as it is defined: no NaN, no text that is not Unicode."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(body.decode(), parse_constant=refuse)


def _check_refusal(asked: Request, status: int, body: Any) -> None:
    if status in (200, 202):
        return
    if body.get("type") == "error":
        assert body.keys() == {"type", "error", "request_id"}
        assert body["error"].keys() == {"type", "message"}
        assert "/messages" in asked.target
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == _ERROR_MEMBERS
        assert body["error"]["type"]
        # What cannot be read as a request has no path.
        assert not _path(asked).startswith("/v1/messages") or asked.kind in ("line", "headers", "gone")
    assert len(body["error"]["message"]) > 8


def words_of(body: Any) -> Expected:
    """Return the words of a reply, whatever its protocol."""
    if "output" in body:
        return _words_of_items(body["output"])
    if "content" in body:
        return _words_of_blocks(body["content"])
    (choice,) = body["choices"]
    if "text" in choice:
        return Expected(text=choice["text"])
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return Expected(message.get("reasoning_content", ""), message["content"], _calls(calls))


def _calls(calls: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((call["name"], json.loads(call["arguments"])) for call in calls)


def _words_of_items(items: Sequence[Any]) -> Expected:
    def texts(kind: str) -> str:
        chosen = [item for item in items if item["type"] == kind]
        return "".join(part["text"] for item in chosen for part in item.get("content") or item["summary"])

    calls = [item for item in items if item["type"] == "function_call"]
    return Expected(texts("reasoning"), texts("message"), _calls(calls))


def _words_of_blocks(blocks: Sequence[Any]) -> Expected:
    def texts(kind: str, member: str) -> str:
        return "".join(block[member] for block in blocks if block["type"] == kind)

    calls = tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
    return Expected(texts("thinking", "thinking"), texts("text", "text"), calls)
