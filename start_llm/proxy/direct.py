"""What goes past LiteLLM to the server, through the same door.

LiteLLM estimates the tokens of a prompt, looks for a kept response without saying whose it is, and does not
know the paths at which clients say hello. It computes nothing here, so nothing of it is missed.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from typing import Any
from urllib.parse import quote

import httpx
from starlette.requests import Request
from starlette.responses import Response

from start_llm.core.tenants import TENANT_HEADER
from start_llm.proxy.wording import Application, Receive, Send, error_body

_BACKEND = os.environ["START_LLM_BACKEND"]
_BACKEND_KEY = os.environ["START_LLM_BACKEND_KEY"]
_PATIENCE_S = 60
_PATHS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (methods, re.compile(path))
    for methods, path in (
        ("POST", r"/v1/messages/count_tokens|(?:/v1)?/responses/input_tokens"),
        ("GET DELETE", r"(?:/v1)?/responses/(?P<name>[^/]+)"),
        ("GET", r"(?:/v1)?/responses/(?P<name>[^/]+)/input_items"),
        ("HEAD", r"/"),
        ("GET HEAD", r"/api/hello"),
    )
)
_PACKED = re.compile(r"litellm:.*;response_id:([A-Za-z0-9_]+)")
_PASSED_BACK = ("content-type", "allow", "retry-after", "request-id", "x-request-id")


class Direct:
    """An ASGI application in front of LiteLLM's."""

    def __init__(self, litellm: Application) -> None:
        self._litellm = litellm
        self._client = httpx.AsyncClient(base_url=_BACKEND, timeout=_PATIENCE_S, trust_env=False)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        found = _found(scope)
        if found is None:
            await self._litellm(scope, receive, send)
            return
        response = await self._answer(Request(scope, receive), found)
        await response(scope, receive, send)

    async def _answer(self, request: Request, found: re.Match[str]) -> Response:
        try:
            return await self._ask(request, found)
        except httpx.TransportError as error:
            problem = f"The server behind this proxy does not answer: {type(error).__name__}."
            return _refused(found.string, 503, problem)

    async def _ask(self, request: Request, found: re.Match[str]) -> Response:
        """The server's own answer, about a response by the name that the client has for it."""
        name = found.groupdict().get("name") or ""
        own_name = _own_name(name)
        headers = {
            "Content-Type": request.headers.get("content-type", "application/json"),
            "Authorization": f"Bearer {_BACKEND_KEY}",
            TENANT_HEADER: request.headers.get(TENANT_HEADER, ""),
        }
        path = found.string.replace(name, quote(own_name, safe="")) if name else found.string
        url = httpx.URL(path, query=request.url.query.encode())
        answer = await self._client.request(
            request.method, url, content=await request.body(), headers=headers
        )
        content = answer.content.replace(own_name.encode(), name.encode()) if name else answer.content
        told = {key: answer.headers[key] for key in _PASSED_BACK if key in answer.headers}
        return Response(content, answer.status_code, told)


def _found(scope: Any) -> re.Match[str] | None:
    if scope["type"] != "http":
        return None
    path = scope["path"].rstrip("/") or "/"
    matches = (pattern.fullmatch(path) for methods, pattern in _PATHS if scope["method"] in methods.split())
    return next((match for match in matches if match), None)


def _own_name(name: str) -> str:
    """The server's name of a response: LiteLLM packs it into one of its own."""
    try:
        told = base64.b64decode(name.removeprefix("resp_"), validate=True).decode()
    except (binascii.Error, ValueError):
        return name
    packed = _PACKED.fullmatch(told)
    return packed[1] if packed else name


def _refused(path: str, status: int, message: str) -> Response:
    return Response(error_body(path, status, message), status, {"Content-Type": "application/json"})
