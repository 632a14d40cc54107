"""Restore the `Retry-After` header of 503 replies.

LiteLLM renames the server's `Retry-After`, and drops it on `/v1/messages`.
"""

from __future__ import annotations

from typing import Any

from start_llm.core.errors import Overloaded
from start_llm.proxy.error_text import Application, Receive, Send

_NAME, _LITELLMS_NAME = b"retry-after", b"llm_provider-retry-after"
_USUAL = Overloaded("").headers["Retry-After"].encode()


class RetryAfter:
    """ASGI middleware around LiteLLM: every 503 reply gets the server's `Retry-After`, or the usual one."""

    def __init__(self, litellm: Application) -> None:
        self._litellm = litellm

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        async def sending(message: Any) -> None:
            is_refusal = message["type"] == "http.response.start" and message["status"] == 503
            await send(_with_retry_after(message) if is_refusal else message)

        await self._litellm(scope, receive, sending)


def _with_retry_after(start: Any) -> Any:
    headers = dict(start["headers"])
    moment = headers.get(_NAME) or headers.get(_LITELLMS_NAME) or _USUAL
    others = [pair for pair in start["headers"] if pair[0] not in (_NAME, _LITELLMS_NAME)]
    return {**start, "headers": [*others, (_NAME, moment)]}
