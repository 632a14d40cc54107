"""Give requests that name no model the name of the one that answers by default.

LiteLLM would make up a name, and show it in the reply.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from starlette.requests import ClientDisconnect, Request

from start_llm.proxy.backend import Backend
from start_llm.proxy.error_text import Application, Receive, Send

_GENERATING = re.compile(r"(?:/v1)?/chat/completions|/v1/messages|(?:/v1)?/responses")


class DefaultModel:
    """ASGI middleware around LiteLLM that completes the bodies of requests that generate."""

    def __init__(self, inside: Application, backend: Backend) -> None:
        self._inside = inside
        self._backend = backend

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if not _generates(scope):
            await self._inside(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        if (asked := _without_model(body)) is not None and (name := await self._name()):
            body = json.dumps(asked | {"model": name}).encode()
            headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
            scope = scope | {"headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await self._inside(scope, _replayed(body, receive), send)

    async def _name(self) -> str | None:
        """Return the model that the server lists first, which answers by default; None if it lists none."""
        try:
            answer = await self._backend.ask("GET", httpx.URL("/v1/models"), (), b"")
            told = await answer.aread()
            await answer.aclose()
            return str(json.loads(told)["data"][0]["id"])
        except (httpx.TransportError, ValueError, LookupError, TypeError):
            return None


def _generates(scope: Any) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return _GENERATING.fullmatch(scope["path"].rstrip("/")) is not None


def _without_model(body: bytes) -> dict[str, Any] | None:
    """Return the parsed body if it is an object that names no model, else None."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return asked if isinstance(asked, dict) and not asked.get("model") else None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which was read already, and then what comes after it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return waiting.pop() if waiting else await receive()

    return replay
