"""When to come again, where clients look for it.

LiteLLM gives the server's `Retry-After` a name of its own, and loses it on `/v1/messages`.
"""

from __future__ import annotations

from typing import Any

from start_llm.core.errors import Overloaded
from start_llm.proxy.wording import Application, Receive, Send

_NAME, _LITELLMS_NAME = b"retry-after", b"llm_provider-retry-after"
_USUAL = Overloaded("").headers["Retry-After"].encode()


class RetryAfter:
    """An ASGI application around LiteLLM's: whoever is told to come again is told when."""

    def __init__(self, litellm: Application) -> None:
        self._litellm = litellm

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        async def sending(message: Any) -> None:
            is_refusal = message["type"] == "http.response.start" and message["status"] == 503
            await send(_with_moment(message) if is_refusal else message)

        await self._litellm(scope, receive, sending)


def _with_moment(start: Any) -> Any:
    headers = dict(start["headers"])
    moment = headers.get(_NAME) or headers.get(_LITELLMS_NAME) or _USUAL
    others = [pair for pair in start["headers"] if pair[0] not in (_NAME, _LITELLMS_NAME)]
    return {**start, "headers": [*others, (_NAME, moment)]}
