"""Add `vision` to the entries of `/v1/models`, where LiteLLM reports windows but not what a model sees."""

from __future__ import annotations

import json
from typing import Any

from start_llm.proxy.error_text import Application, Receive, Send

_PATHS = ("/v1/models", "/models")


class ListedModels:
    """ASGI middleware around LiteLLM.

    Args:
        sees: whether the model, which answers under every name, sees images.
    """

    def __init__(self, litellm: Application, *, sees: bool) -> None:
        self._litellm = litellm
        self._sees = sees

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        is_list = scope["type"] == "http" and scope["path"].rstrip("/") in _PATHS
        if not is_list or scope["method"] != "GET":
            await self._litellm(scope, receive, send)
            return
        start: list[Any] = []
        pieces: list[bytes] = []

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
                return
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._send(start[0], b"".join(pieces), send)

        await self._litellm(scope, receive, sending)

    async def _send(self, start: Any, body: bytes, send: Send) -> None:
        if start["status"] == 200:
            listed = json.loads(body)
            listed["data"] = [{**entry, "vision": self._sees} for entry in listed["data"]]
            body = json.dumps(listed).encode()
            others = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
            start = {**start, "headers": [*others, (b"content-length", str(len(body)).encode())]}
        await send(start)
        await send({"type": "http.response.body", "body": body})
