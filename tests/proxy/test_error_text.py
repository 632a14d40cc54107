"""Errors as the server has told them, out of the sentences that LiteLLM makes of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from start_llm.proxy.error_text import ErrorResponse, ErrorRewriter

TOO_LONG = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": 'prompt is too long: 9 tokens > 8 maximum - {"a"'},
    "request_id": "req_1",
}
HEADERS = [(b"accept-encoding", b"gzip"), (b"x-a", b"b")]
AROUND = "litellm.BadRequestError: Litellm_proxyException - {}\n\nLiteLLM: model group 'x' failed."


def litellms(message: str) -> bytes:
    """The same error in LiteLLM's words."""
    return json.dumps({"type": "error", "error": {"type": "x", "message": message}}).encode()


@dataclass
class Server:
    """Has this against every request that it is asked about."""

    told: ErrorResponse | None = None
    asked: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])

    async def refusal(self, scope: Any, body: bytes) -> ErrorResponse | None:
        self.asked.append((scope["path"], body))
        return self.told


def through(
    path: str,
    status: int,
    *parts: bytes,
    kind: str = "application/json",
    server: Server | None = None,
    method: str = "POST",
) -> tuple[Any, bytes]:
    """Return the client's view of a reply that LiteLLM sends in these parts."""
    heard: list[Any] = []
    sent = [{"body": b"as", "more_body": True}, {"body": b"ked"}]

    async def litellm(scope: Any, receive: Any, send: Any) -> None:
        assert scope["headers"] == [(b"x-a", b"b")], "it must not pack what it says"
        for _ in range(2):
            await receive()
        headers = [(b"content-type", kind.encode()), (b"content-length", b"1"), (b"x-a", b"b")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for at, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": at < len(parts) - 1})

    async def send(message: Any) -> None:
        heard.append(message)

    async def receive() -> Any:
        return {"type": "http.request", **sent.pop(0)}

    scope = {"type": "http", "path": path, "method": method, "headers": HEADERS}
    asyncio.run(ErrorRewriter(litellm, server or Server())(scope, receive, send))
    start, *bodies = heard
    assert [one.get("more_body", False) for one in bodies] == [True] * (len(bodies) - 1) + [False]
    return start, b"".join(one["body"] for one in bodies)


def test_the_error_that_is_quoted_is_told():
    told = litellms(AROUND.format(json.dumps(TOO_LONG)))
    start, body = through("/v1/messages", 400, told[:50], told[50:])
    assert json.loads(body) == TOO_LONG
    assert (start["status"], dict(start["headers"])[b"x-a"]) == (400, b"b")
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()


@pytest.mark.parametrize("message", ["no", AROUND.format('{"no": "error"}'), AROUND.format('{"error": {"a"')])
def test_where_none_is_quoted_it_stays_as_it_is(message: str):
    told = litellms(message)
    assert through("/v1/messages", 400, told)[1] == told


@pytest.mark.parametrize(
    ("path", "told", "kind"),
    [
        ("/v1/messages", {"error": {"message": "no", "code": "401"}}, "authentication_error"),
        ("/v1/messages/x", {"detail": "no"}, "authentication_error"),
    ],
)
def test_anthropics_clients_get_anthropics_form(path: str, told: Any, kind: str):
    _, body = through(path, 401, json.dumps(told).encode())
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_others_get_openais():
    _, body = through("/v1/x", 404, b'{"detail": "no"}')
    error = {"type": "not_found_error", "message": "no", "param": None, "code": None}
    assert json.loads(body) == {"error": error}
    told = json.dumps({"error": {"message": "no", "code": "404"}}).encode()
    assert through("/v1/messagesx", 404, told)[1] == told


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"no json", b'{"detail": 5}', b'{"error": 5}'])
def test_what_is_no_error_of_any_form_is_left_alone(body: bytes):
    assert through("/v1/messages", 500, body)[1] == body


def test_other_replies_pass_as_they_come():
    start, body = through("/v1/messages", 200, b"a", b"b")
    assert (dict(start["headers"])[b"content-length"], body) == (b"1", b"ab")
    assert through("/v1/messages", 500, b"<html>", kind="text/html")[1] == b"<html>"


AGAINST_IT = ErrorResponse(400, b'{"error": {"code": "context_length_exceeded"}}')


@pytest.mark.parametrize("status", [400, 413, 422, 500])
@pytest.mark.parametrize("told", [b"no json", b'{"error": {"message": "no", "code": "400"}}'])
def test_of_what_litellm_does_not_take_the_server_says_why(status: int, told: bytes):
    server = Server(AGAINST_IT)
    start, body = through("/v1/chat/completions", status, told, server=server)
    assert (start["status"], body) == (AGAINST_IT.status, AGAINST_IT.body)
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    assert server.asked == [("/v1/chat/completions", b"asked")]


def test_where_the_server_has_nothing_against_it_litellms_words_stay():
    told = json.dumps({"error": {"message": "no", "code": "500"}}).encode()
    start, body = through("/v1/chat/completions", 500, told, server=Server())
    assert (start["status"], body) == (500, told)


@pytest.mark.parametrize(
    ("status", "method", "message"),
    [
        (503, "POST", "full"),
        (401, "POST", "no"),
        (500, "GET", "no"),
        (400, "POST", AROUND.format(json.dumps(TOO_LONG))),
    ],
)
def test_nobody_is_asked_where_the_reason_is_clear(status: int, method: str, message: str):
    server = Server(AGAINST_IT)
    start, _ = through("/v1/messages", status, litellms(message), server=server, method=method)
    assert (start["status"], server.asked) == (status, [])
