"""Forward some requests to the server without LiteLLM; the access policy has checked them already.

LiteLLM would turn a text completion into a chat, estimate token counts, and look up a stored response without
the caller's key. Of models it lists those of its configuration, and not which of the server's are loaded. It
does not know the paths that clients use to see whether a server is there and how it is, and its own `/health`
sends a completion to each model.
"""

from typing import Any
from urllib.parse import quote

import anyio
import httpx
from starlette.requests import ClientDisconnect, Request

from start_llm.protocols.routes import RouteMatch
from start_llm.proxy.backend import Backend
from start_llm.proxy.chosen_server import ChosenBackend
from start_llm.proxy.error_text import Application, Receive, Send, error_body
from start_llm.proxy.open_routes import OPEN_ROUTES
from start_llm.proxy.relay import reply_head


class Direct:
    """ASGI middleware that forwards requests that the server answers itself, and passes others to LiteLLM."""

    def __init__(self, litellm: Application, backend: Backend | ChosenBackend) -> None:
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
        path = match.path(quote(match.name))
        url = httpx.URL(path, query=scope["query_string"])
        try:
            answer = await self._backend.ask(scope["method"], url, scope["headers"], body)
        except httpx.TransportError as error:
            await _refuse(send, path, error)
            return
        try:
            await send(reply_head(answer))
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            await answer.aclose()


async def _leave_with_client(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _refuse(send: Send, path: str, error: httpx.TransportError) -> None:
    problem = f"The server behind this proxy does not answer: {type(error).__name__}."
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": error_body(path, 503, problem)})
