"""Check every request before LiteLLM sees it: caller, route, body type and body size.

LiteLLM has about a thousand routes. A tenth of them need no authentication (logins, `/health/drain`, MCP,
whole pages). Some of the others reveal the configuration, or send completions of their own (`/health`). So a
table lists the routes that clients need, and every other path returns 404.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from start_llm.core.access_policy import AccessPolicy, body_length, demand_json
from start_llm.core.client_name import CLIENT_HEADER
from start_llm.core.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestError,
)
from start_llm.core.tenants import TENANT_HEADER, key_of, tenant_of_key
from start_llm.proxy.error_text import Application, Receive, Send, error_body
from start_llm.proxy.refusals import ProxyRefusal

_MESSAGES = "/v1/messages"
_NAME = r"[A-Za-z0-9_+=.-]{1,2000}"
_ROUTES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(path), tuple(methods.split()))
    for path, methods in (
        (r"(/v1)?/chat/completions|(/v1)?/completions|(/v1)?/embeddings", "POST"),
        (rf"{_MESSAGES}(/count_tokens)?", "POST"),
        (r"(/v1)?/responses(/input_tokens)?", "POST"),
        (rf"(/v1)?/responses/(?!\.){_NAME}", "GET DELETE"),
        (rf"(/v1)?/responses/(?!\.){_NAME}/input_items", "GET"),
        (rf"(/v1)?/models(/(?!\.){_NAME}){{0,2}}", "GET HEAD"),
        (r"/api/hello|/", "GET HEAD"),
        (r"/health|/stats|/metrics|/health/live(li)?ness", "GET HEAD"),
    )
)
_OPEN = re.compile(r"/|/api/hello|/health(/live(li)?ness)?")


class ProxyAccessPolicy:
    """ASGI middleware that refuses a request, or passes it on with its caller's tenant and program.

    Args:
        max_body_bytes: the longest request body that is accepted.
    """

    def __init__(self, inside: Application, access_policy: AccessPolicy, max_body_bytes: int) -> None:
        self._inside = inside
        self._access_policy = access_policy
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._answer(scope, receive, send)
            case "websocket":
                # A close before the accept gives the client a 403.
                await send({"type": "websocket.close", "code": 1008})
            case _:
                await self._inside(scope, receive, send)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") or "/"
        headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        said = dict(headers)
        send = _telling(send, self._access_policy.origins.headers(said))
        try:
            if self._access_policy.origins.is_preflight(scope["method"], said):
                self._access_policy.admit(headers, scope["server"][0], asks_key=False)
                await _send(send, 204, self._access_policy.origins.preflight(said), b"")
                return
            self._admit(scope, path, headers)
            if scope["method"] == "POST":
                receive = await _as_object(receive)
        except RequestError as error:
            _tell_refusal(scope["method"], path, error)
            await _refuse(send, path, error)
            return
        await self._inside(scope | {"headers": _with_caller(headers)}, receive, send)

    def _admit(self, scope: Any, path: str, headers: Sequence[tuple[str, str]]) -> None:
        self._access_policy.admit(headers, scope["server"][0], asks_key=not _OPEN.fullmatch(path))
        _find(scope["method"], path)
        said = dict(headers)
        if scope["method"] == "POST":
            demand_json(said.get("content-type"))
        body_length(said, self._max_body_bytes)  # here, as LiteLLM reads all of the body into memory first


async def _as_object(receive: Receive) -> Receive:
    """Return a `receive` for the same body, if the body begins like a JSON object.

    LiteLLM crashes on any other JSON value.

    Raises:
        InvalidRequest: the body does not begin with `{`.
    """
    first = await receive()
    if not first.get("body", b"{").lstrip().startswith(b"{"):
        raise InvalidRequest("The body must be a JSON object.")
    waiting = [first]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


def _find(method: str, path: str) -> None:
    methods = next((methods for pattern, methods in _ROUTES if pattern.fullmatch(path)), None)
    if methods is None:
        raise NotFound(f"There is nothing at {path[:200]}.")
    if method not in methods:
        raise MethodNotAllowed(
            f"{path[:200]} answers {' and '.join(methods)}, not {method}.", allowed=methods
        )


def _with_caller(headers: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Put tenant and program of the caller into headers that LiteLLM passes on."""
    said = dict(headers)
    ours = {TENANT_HEADER: tenant_of_key(key_of(said)), CLIENT_HEADER: said.get("user-agent", "")}
    kept = [(name, value) for name, value in headers if name not in ours]
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (*kept, *ours.items())]


def _tell_refusal(method: str, path: str, error: RequestError) -> None:
    refusal = ProxyRefusal(method=method, path=path, status=error.status, reason=error.message)
    print(refusal.as_line(), flush=True)


async def _refuse(send: Send, path: str, error: RequestError) -> None:
    body = error_body(path, error.status, error.message)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    # The body was not read. Without a close its bytes could be parsed as the next request.
    headers["Connection"] = "close"
    await _send(send, error.status, headers, body)


async def _send(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": body})


def _telling(send: Send, headers: Mapping[str, str]) -> Send:
    """Return a `send` that adds these headers to the reply."""

    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message.get("headers", ()), *_encoded(headers)]}
        await send(message)

    return send_with_headers if headers else send


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
