"""Forward some requests to the server without LiteLLM; the access policy has checked them already.

LiteLLM would turn a text completion into a chat, estimate token counts, and look up a stored response without
the caller's key. Of models it lists those of its configuration, and not which of the server's are loaded. It
does not know the paths that clients use to see whether a server is there and how it is, and its own `/health`
sends a completion to each model.
"""

import base64
import binascii
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import anyio
import httpx
from starlette.requests import ClientDisconnect, Request

from start_llm.core.answering_model import ANSWERING_MODEL
from start_llm.core.unenforced import UNENFORCED
from start_llm.protocols.routes import RouteMatch
from start_llm.proxy.backend import Backend
from start_llm.proxy.error_text import Application, Receive, Send, error_body
from start_llm.proxy.open_routes import OPEN_ROUTES

_PACKED = re.compile(r"litellm:.*;response_id:([A-Za-z0-9_]+)")
_PASSED_BACK = (
    "content-type",
    "allow",
    "retry-after",
    "request-id",
    "x-request-id",
    ANSWERING_MODEL,
    UNENFORCED,
)


class Direct:
    """ASGI middleware that forwards requests that the server answers itself, and passes others to LiteLLM."""

    def __init__(self, litellm: Application, backend: Backend) -> None:
        self._litellm = litellm
        self._backend = backend

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        match = OPEN_ROUTES.find(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if match is None or match.route.proxy != "server":
            await self._litellm(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_leave_with_client, receive, group.cancel_scope)
            await self._answer(scope, body, match, send)
            group.cancel_scope.cancel()

    async def _answer(self, scope: Any, body: bytes, match: RouteMatch, send: Send) -> None:
        """Send the server's answer. In it, a stored response keeps the id that the client knows."""
        name, own_name = match.name, _own_name(match.name)
        path = match.path(quote(own_name))
        url = httpx.URL(path, query=scope["query_string"])
        try:
            answer = await self._backend.ask(scope["method"], url, scope["headers"], body)
        except httpx.TransportError as error:
            await _refuse(send, path, error)
            return
        try:
            await send(_start(answer, keeps_length=name == own_name))
            pieces = answer.aiter_raw() if name == own_name else _renamed(answer, own_name, name)
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            await answer.aclose()


async def _renamed(answer: httpx.Response, own_name: str, name: str) -> AsyncIterator[bytes]:
    yield (await answer.aread()).replace(own_name.encode(), name.encode())


async def _leave_with_client(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _start(answer: httpx.Response, *, keeps_length: bool) -> dict[str, Any]:
    passed = (*_PASSED_BACK, "content-length") if keeps_length else _PASSED_BACK
    headers = [
        (key.encode(), answer.headers[key].encode("latin-1")) for key in passed if key in answer.headers
    ]
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}


def _own_name(name: str) -> str:
    """Return the server's id of a response. LiteLLM encodes it into an id of its own."""
    try:
        told = base64.b64decode(name.removeprefix("resp_"), validate=True).decode()
    except (binascii.Error, ValueError):
        return name
    packed = _PACKED.fullmatch(told)
    return packed[1] if packed else name


async def _refuse(send: Send, path: str, error: httpx.TransportError) -> None:
    problem = f"The server behind this proxy does not answer: {type(error).__name__}."
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": error_body(path, 503, problem)})
