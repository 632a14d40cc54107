"""Answer a request that the proxy refuses itself, and tell the server of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from start_llm.core.errors import RequestError
from start_llm.proxy.error_text import Send, error_body
from start_llm.proxy.refusals import ProxyRefusal


async def refuse(scope: Any, send: Send, error: RequestError) -> None:
    """Send an error in the form of the protocol that the path belongs to."""
    path = scope["path"].rstrip("/") or "/"
    refusal = ProxyRefusal(method=scope["method"], path=path, status=error.status, reason=error.message)
    print(refusal.as_line(), flush=True)
    body = error_body(path, error.status, error.message, param=error.param, code=error.code)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    # The body may be unread. Without a close its bytes could be parsed as the next request.
    headers["Connection"] = "close"
    await respond(send, error.status, headers, body)


async def respond(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Send a whole response."""
    await send({"type": "http.response.start", "status": status, "headers": encoded(headers.items())})
    await send({"type": "http.response.body", "body": body})


def encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
