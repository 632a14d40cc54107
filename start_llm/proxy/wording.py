"""Errors in the server's own words.

LiteLLM tells the errors of `/v1/messages` and `/v1/responses` in a sentence of its own, with the server's
whole body quoted in it, those of chats without their code and field, and what it refuses itself in forms
that no protocol has; over a field of another type it falls. Clients act on words and codes: Claude Code takes
"prompt is too long: A tokens > B maximum" for what it is. So the server is asked what it has against it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

type Send = Callable[[Any], Awaitable[None]]
type Receive = Callable[[], Awaitable[Any]]
type Application = Callable[[Any, Receive, Send], Awaitable[None]]

_MESSAGES = "/v1/messages"
_QUOTED = " - {"
_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's names; OpenAI's clients go by the status."""
_DOUBTFUL = (400, 413, 422, 500)
"""What may have another reason than LiteLLM gives."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served."""

    status: int
    body: bytes


def error_body(path: str, status: int, message: str) -> bytes:
    """An error in the form of the protocol that the path belongs to."""
    error: dict[str, Any] = {"type": _KINDS.get(status, "invalid_request_error"), "message": message}
    if _is_anthropics(path):
        return json.dumps({"type": "error", "error": error}).encode()
    return json.dumps({"error": {**error, "param": None, "code": None}}).encode()


def _is_anthropics(path: str) -> bool:
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


class Judge(Protocol):
    """Who knows what is wrong with a request."""

    async def refusal(self, scope: Any, body: bytes) -> Refusal | None:
        """None: nothing, as far as is known."""
        ...


class OwnWords:
    """An ASGI application around LiteLLM's: replies with an error status are put into words again."""

    def __init__(self, litellm: Application, judge: Judge) -> None:
        self._litellm = litellm
        self._judge = judge

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._litellm(scope, receive, send)
            return
        asked: list[bytes] = []
        start: Any = None
        body = b""

        async def receiving() -> Any:
            message = await receive()
            asked.append(message.get("body", b""))
            return message

        async def sending(message: Any) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and _is_error(message):
                start = message
            elif start is None:
                asked.clear()
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    told = await self._told(scope, b"".join(asked), Refusal(start["status"], body))
                    await _refuse(send, start, told)

        # On one machine nothing has to be packed, and what is packed cannot be read here.
        headers = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
        await self._litellm(scope | {"headers": headers}, receiving, sending)

    async def _told(self, scope: Any, asked: bytes, refusal: Refusal) -> Refusal:
        """The error that is quoted; else the server's; else LiteLLM's own in the form of the protocol."""
        message, given = _read(refusal.body)
        quoted = _quoted(message) if message else None
        if quoted is not None:
            return replace(refusal, body=json.dumps(quoted).encode())
        if scope["method"] == "POST" and refusal.status in _DOUBTFUL:
            known = await self._judge.refusal(scope, asked)
            if known:
                return known
        if message is None or _has_its_form(scope["path"], given):
            return refusal
        return replace(refusal, body=error_body(scope["path"], refusal.status, message))


def _is_error(start: Any) -> bool:
    headers = dict(start["headers"])
    return start["status"] >= 400 and headers.get(b"content-type", b"").startswith(b"application/json")


async def _refuse(send: Send, start: Any, told: Refusal) -> None:
    headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
    headers.append((b"content-length", str(len(told.body)).encode()))
    await send({**start, "status": told.status, "headers": headers})
    await send({"type": "http.response.body", "body": told.body})


def _read(body: bytes) -> tuple[str | None, Any]:
    """LiteLLM's sentence, and what it stands in."""
    try:
        given = json.loads(body)
    except ValueError:
        return None, None
    error = given.get("error") if isinstance(given, dict) else None
    message = error.get("message") if isinstance(error, dict) else _detail(given)
    return (message if isinstance(message, str) else None), given


def _detail(given: Any) -> Any:
    """As FastAPI tells what it refuses."""
    return given.get("detail") if isinstance(given, dict) else None


def _quoted(message: str) -> Any:
    """The server's body in a sentence of LiteLLM's; None if there is none."""
    at = message.find(_QUOTED)
    if at < 0:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(message, at + len(_QUOTED) - 1)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("error"), dict) else None


def _has_its_form(path: str, given: Any) -> bool:
    return given.get("type") == "error" if _is_anthropics(path) else "error" in given
