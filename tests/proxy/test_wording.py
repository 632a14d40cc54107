"""Errors as the server has told them, out of the sentences that LiteLLM makes of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from start_llm.proxy.wording import OwnWords

TOO_LONG = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": 'prompt is too long: 9 tokens > 8 maximum - {"a"'},
    "request_id": "req_1",
}
AROUND = "litellm.BadRequestError: Litellm_proxyException - {}\n\nLiteLLM: model group 'x' failed."


def litellms(message: str) -> bytes:
    """The same error in LiteLLM's words."""
    return json.dumps({"type": "error", "error": {"type": "x", "message": message}}).encode()


def through(path: str, status: int, *parts: bytes, kind: str = "application/json") -> tuple[Any, bytes]:
    """What the client gets of a reply that LiteLLM sends in these parts."""
    heard: list[Any] = []

    async def litellm(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        headers = [(b"content-type", kind.encode()), (b"content-length", b"1"), (b"x-a", b"b")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for at, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": at < len(parts) - 1})

    async def send(message: Any) -> None:
        heard.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    asyncio.run(OwnWords(litellm)({"type": "http", "path": path}, receive, send))
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
