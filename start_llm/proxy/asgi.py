"""ASGI's types, and errors in the form of the protocol that a path belongs to."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from start_llm.access.request_target import with_one_version
from start_llm.core.errors import anthropic_type

type Send = Callable[[Any], Awaitable[None]]
type Receive = Callable[[], Awaitable[Any]]
type Application = Callable[[Any, Receive, Send], Awaitable[None]]

_MESSAGES = "/v1/messages"


def error_body(
    path: str, status: int, message: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """Return an error body in the form of the protocol that the path belongs to."""
    error: dict[str, Any] = {"type": anthropic_type(status), "message": message}
    path = with_one_version(path)
    if path == _MESSAGES or path.startswith(f"{_MESSAGES}/"):
        return json.dumps({"type": "error", "error": error}).encode()
    return json.dumps({"error": {**error, "param": param, "code": code}}).encode()
