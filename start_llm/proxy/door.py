"""The outermost layer of the proxy: what does not belong here never reaches LiteLLM.

LiteLLM has about a thousand routes. A tenth of them ask nobody who calls (logins, `/health/drain`, MCP, whole
pages), and some that do ask tell of the machine or send completions of their own (`/health`). What clients
need is a table; everything else is not there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from start_llm.core.door import Door, demand_json
from start_llm.core.errors import (
    BodyTooLarge,
    InvalidRequest,
    LengthRequired,
    MethodNotAllowed,
    NotFound,
    RequestError,
)
from start_llm.core.tenants import TENANT_HEADER, key_of, tenant_of_key
from start_llm.proxy.wording import Application, Receive, Send, error_body

_MESSAGES = "/v1/messages"
_NAME = r"[A-Za-z0-9_+=.-]{1,2000}"
_ROUTES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(path), tuple(methods.split()))
    for path, methods in (
        (r"(/v1)?/chat/completions|(/v1)?/completions", "POST"),
        (rf"{_MESSAGES}(/count_tokens)?", "POST"),
        (r"(/v1)?/responses(/input_tokens)?", "POST"),
        (rf"(/v1)?/responses/(?!\.){_NAME}", "GET DELETE"),
        (rf"(/v1)?/responses/(?!\.){_NAME}/input_items", "GET"),
        (rf"(/v1)?/models(/(?!\.){_NAME}){{0,2}}", "GET HEAD"),
        (r"/api/hello|/", "GET HEAD"),
        (r"/health/live(li)?ness", "GET HEAD"),
    )
)
_OPEN = re.compile(r"/|/api/hello|/health/live(li)?ness")


class ProxyDoor:
    """An ASGI application around another one.

    Args:
        most_body_bytes: longest body of a request.
    """

    def __init__(self, inside: Application, door: Door, most_body_bytes: int) -> None:
        self._inside = inside
        self._door = door
        self._most_body_bytes = most_body_bytes

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._answer(scope, receive, send)
            case "websocket":
                # Before it was accepted: the client gets a 403.
                await send({"type": "websocket.close", "code": 1008})
            case _:
                await self._inside(scope, receive, send)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") or "/"
        headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        try:
            self._admit(scope, path, headers)
            if scope["method"] == "POST":
                receive = await _as_object(receive)
        except RequestError as error:
            await _refuse(send, path, error)
            return
        await self._inside(scope | {"headers": _with_tenant(headers)}, receive, send)

    def _admit(self, scope: Any, path: str, headers: Sequence[tuple[str, str]]) -> None:
        self._door.admit(headers, scope["server"][0], asks_key=not _OPEN.fullmatch(path))
        _find(scope["method"], path)
        said = dict(headers)
        if scope["method"] == "POST":
            demand_json(said.get("content-type"))
        self._measure(said)

    def _measure(self, said: Mapping[str, str]) -> None:
        """LiteLLM has the whole body in memory before it looks at anything."""
        if "transfer-encoding" in said:
            raise LengthRequired("Transfer-Encoding is not supported for requests; send Content-Length.")
        length = said.get("content-length", "0").strip()
        if not (length.isascii() and length.isdigit()):
            raise InvalidRequest("Content-Length must be one whole number of bytes.")
        if len(length) > 18 or int(length) > self._most_body_bytes:
            raise BodyTooLarge(
                f"The body is longer than the {self._most_body_bytes} bytes that MAX_BODY_BYTES allows."
            )


async def _as_object(receive: Receive) -> Receive:
    """What receives the same body. LiteLLM falls over one that is no object.

    Raises:
        InvalidRequest: it begins as something else.
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


def _with_tenant(headers: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Whose request it is, in a header that LiteLLM passes on; what the client says of that is dropped."""
    tenant = (TENANT_HEADER, tenant_of_key(key_of(dict(headers))))
    kept = [(name, value) for name, value in headers if name != TENANT_HEADER]
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (*kept, tenant)]


async def _refuse(send: Send, path: str, error: RequestError) -> None:
    body = error_body(path, error.status, error.message)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    # Of a body that was not read nothing is to be taken for a request.
    headers["Connection"] = "close"
    sent = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": sent})
    await send({"type": "http.response.body", "body": body})
