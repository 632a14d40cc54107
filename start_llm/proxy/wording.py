"""Errors in the server's own words.

LiteLLM tells the errors of `/v1/messages` and `/v1/responses` in a sentence of its own, with the server's
whole body quoted in it, and what it refuses itself in forms that neither protocol has. Clients act on the
words: Claude Code takes "prompt is too long: A tokens > B maximum" for what it is.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

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


def error_body(path: str, status: int, message: str) -> bytes:
    """An error in the form of the protocol that the path belongs to."""
    error: dict[str, Any] = {"type": _KINDS.get(status, "invalid_request_error"), "message": message}
    if _is_anthropics(path):
        return json.dumps({"type": "error", "error": error}).encode()
    return json.dumps({"error": {**error, "param": None, "code": None}}).encode()


def _is_anthropics(path: str) -> bool:
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


class OwnWords:
    """An ASGI application around LiteLLM's: replies with an error status are put into words again."""

    def __init__(self, litellm: Application) -> None:
        self._litellm = litellm

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._litellm(scope, receive, send)
            return
        start: Any = None
        body = b""

        async def sending(message: Any) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and _is_error(message):
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    for told in _reworded(scope["path"], start, body):
                        await send(told)

        await self._litellm(scope, receive, sending)


def _is_error(start: Any) -> bool:
    headers = dict(start["headers"])
    return start["status"] >= 400 and headers.get(b"content-type", b"").startswith(b"application/json")


def _reworded(path: str, start: Any, body: bytes) -> tuple[Any, Any]:
    """The two messages of an error reply."""
    told = _words(path, start["status"], body)
    headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
    headers.append((b"content-length", str(len(told)).encode()))
    return {**start, "headers": headers}, {"type": "http.response.body", "body": told}


def _words(path: str, status: int, body: bytes) -> bytes:
    """The error that is quoted; else LiteLLM's own in the form of the protocol."""
    try:
        given = json.loads(body)
    except ValueError:
        return body
    error = given.get("error") if isinstance(given, dict) else None
    message = error.get("message") if isinstance(error, dict) else _detail(given)
    if not isinstance(message, str):
        return body
    quoted = _quoted(message)
    if quoted is not None:
        return json.dumps(quoted).encode()
    return body if _has_its_form(path, given) else error_body(path, status, message)


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
