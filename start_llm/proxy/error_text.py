"""Replace LiteLLM's error bodies by the server's own.

LiteLLM changes errors in four ways. On `/v1/messages` and `/v1/responses` it quotes the server's whole body
in a sentence of its own. From chats it drops the code and the field name. Its own refusals have the form of
no protocol. A field of an unexpected type makes it fail. But clients act on the exact words and codes: Claude
Code recognises "prompt is too long: A tokens > B maximum". So the same body is sent to the server again, to
get the server's own error.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from start_llm.access.request_target import with_one_version
from start_llm.core.errors import anthropic_type

type Send = Callable[[Any], Awaitable[None]]
type Receive = Callable[[], Awaitable[Any]]
type Application = Callable[[Any, Receive, Send], Awaitable[None]]

_MESSAGES = "/v1/messages"
_QUOTED = " - {"
_AMBIGUOUS_STATUSES = (400, 413, 422, 500)
"""Statuses for which LiteLLM may give a wrong reason."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error response: status and JSON body."""

    status: int
    body: bytes


def error_body(
    path: str, status: int, message: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """Return an error body in the form of the protocol that the path belongs to."""
    error: dict[str, Any] = {"type": anthropic_type(status), "message": message}
    if _is_anthropics(path):
        return json.dumps({"type": "error", "error": error}).encode()
    return json.dumps({"error": {**error, "param": param, "code": code}}).encode()


def _is_anthropics(path: str) -> bool:
    path = with_one_version(path)
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


class RequestValidator(Protocol):
    """Checks a request without computing a reply."""

    async def refusal(self, scope: Any, body: bytes) -> ErrorResponse | None:
        """Return the error that this request gets; None if no error is known."""
        ...


class ErrorRewriter:
    """ASGI middleware around LiteLLM that rewrites JSON replies with an error status."""

    def __init__(self, litellm: Application, validator: RequestValidator) -> None:
        self._litellm = litellm
        self._judge = validator

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
                    told = await self._told(scope, b"".join(asked), ErrorResponse(start["status"], body))
                    await _refuse(send, start, told)

        # A compressed body could not be read here, and on one machine compression saves nothing.
        headers = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
        await self._litellm(scope | {"headers": headers}, receiving, sending)

    async def _told(self, scope: Any, asked: bytes, refusal: ErrorResponse) -> ErrorResponse:
        """Return the error that LiteLLM quotes; else the server's; else LiteLLM's in the protocol's form."""
        message, given = _read(refusal.body)
        quoted = _quoted(message) if message else None
        if quoted is not None:
            return replace(refusal, body=json.dumps(quoted).encode())
        if scope["method"] == "POST" and refusal.status in _AMBIGUOUS_STATUSES:
            known = await self._judge.refusal(scope, asked)
            if known:
                return known
        if message is None or _has_its_form(scope["path"], given):
            return refusal
        return replace(refusal, body=error_body(scope["path"], refusal.status, message))


def _is_error(start: Any) -> bool:
    headers = dict(start["headers"])
    return start["status"] >= 400 and headers.get(b"content-type", b"").startswith(b"application/json")


async def _refuse(send: Send, start: Any, told: ErrorResponse) -> None:
    headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
    headers.append((b"content-length", str(len(told.body)).encode()))
    await send({**start, "status": told.status, "headers": headers})
    await send({"type": "http.response.body", "body": told.body})


def _read(body: bytes) -> tuple[str | None, Any]:
    """Return LiteLLM's message (None if there is none) and the parsed body."""
    try:
        given = json.loads(body)
    except ValueError:
        return None, None
    error = given.get("error") if isinstance(given, dict) else None
    message = error.get("message") if isinstance(error, dict) else _detail(given)
    return (message if isinstance(message, str) else None), given


def _detail(given: Any) -> Any:
    """Return the field that FastAPI puts its errors into."""
    return given.get("detail") if isinstance(given, dict) else None


def _quoted(message: str) -> Any:
    """Return the server's error body that LiteLLM quotes in its message; None if it quotes none."""
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
