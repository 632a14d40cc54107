"""Give clients the server's own headers: the model that has answered, and `Retry-After`.

LiteLLM renames the server's headers, and drops those of a whole reply of `/v1/messages`. So the model is read
where its HTTP client gets it, for the request of the proxy that this happens in.
"""

from contextvars import ContextVar
from functools import wraps
from typing import Any

import httpx

from start_llm.core.answering_model import ANSWERING_MODEL
from start_llm.core.errors import Overloaded
from start_llm.proxy.error_text import Application, Receive, Send

_LITELLMS_NAME = f"llm_provider-{ANSWERING_MODEL}".encode()
_ANSWERED: ContextVar[list[str] | None] = ContextVar("answered", default=None)
"""The models that have answered for the request at hand. Tasks that it starts share the list."""


class AnsweringModel:
    """ASGI middleware around LiteLLM that adds the header. `watch_replies` has to be called before."""

    def __init__(self, litellm: Application) -> None:
        self._litellm = litellm

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        answered = list[str]()

        async def sending(message: Any) -> None:
            await send(_naming(message, answered) if message["type"] == "http.response.start" else message)

        token = _ANSWERED.set(answered)
        try:
            await self._litellm(scope, receive, sending)
        finally:
            _ANSWERED.reset(token)


def _naming(start: Any, answered: list[str]) -> Any:
    others = [pair for pair in start["headers"] if pair[0] != _LITELLMS_NAME]
    named = [(ANSWERING_MODEL.encode(), answered[-1].encode("latin-1"))] if answered else []
    return {**start, "headers": [*others, *named]}


def watch_replies() -> None:
    """Note the header of each reply that this process gets."""
    plain = httpx.AsyncClient.send

    @wraps(plain)
    async def send(self: httpx.AsyncClient, *arguments: Any, **options: Any) -> httpx.Response:
        response = await plain(self, *arguments, **options)
        answered, model = _ANSWERED.get(), response.headers.get(ANSWERING_MODEL)
        if answered is not None and model:
            answered.append(model)
        return response

    httpx.AsyncClient.send = send


_RETRY_AFTER, _LITELLMS_RETRY = b"retry-after", b"llm_provider-retry-after"
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
    moment = headers.get(_RETRY_AFTER) or headers.get(_LITELLMS_RETRY) or _USUAL
    others = [pair for pair in start["headers"] if pair[0] not in (_RETRY_AFTER, _LITELLMS_RETRY)]
    return {**start, "headers": [*others, (_RETRY_AFTER, moment)]}
