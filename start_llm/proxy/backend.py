"""The server behind the proxy, as it is asked without LiteLLM."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from start_llm.proxy.wording import Refusal

_BACKEND = os.environ["START_LLM_BACKEND"]
_BACKEND_KEY = os.environ["START_LLM_BACKEND_KEY"]
_PATIENCE_S = 60
_QUESTIONS: Mapping[str, str] = {
    "/chat/completions": "/v1/cache/explain",
    "/v1/chat/completions": "/v1/cache/explain",
    "/v1/messages": "/v1/messages/count_tokens",
    "/responses": "/v1/responses/input_tokens",
    "/v1/responses": "/v1/responses/input_tokens",
}
"""Who reads the same bodies, and computes nothing."""

type Headers = Iterable[tuple[bytes, bytes]]


class Backend:
    """Safe to use from any task of one event loop."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            base_url=_BACKEND,
            timeout=httpx.Timeout(_PATIENCE_S, read=None),
            # A kept connection may be one that the server is about to close.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def ask(self, method: str, url: httpx.URL, headers: Headers, body: bytes) -> httpx.Response:
        """Its reply, whose body is still to be read, and which has to be closed.

        Args:
            headers: the client's, of which those are passed on that LiteLLM passes on too.

        Raises:
            httpx.TransportError: there is none.
        """
        named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        sent = {name: value for name, value in named if _is_passed_on(name)}
        sent |= {"Authorization": f"Bearer {_BACKEND_KEY}", "Accept-Encoding": "identity"}
        request = self._client.build_request(method, url, content=body, headers=sent)
        return await self._client.send(request, stream=True)

    async def refusal(self, scope: Any, body: bytes) -> Refusal | None:
        """What the server has against a request that LiteLLM does not take; None if nothing is known."""
        question = _QUESTIONS.get(scope["path"].rstrip("/"))
        if question is None:
            return None
        try:
            answer = await self.ask("POST", httpx.URL(question), scope["headers"], body)
            told = await answer.aread()
        except httpx.TransportError:
            return None
        await answer.aclose()
        return Refusal(answer.status_code, told) if 400 <= answer.status_code < 500 else None


def _is_passed_on(header: str) -> bool:
    return header == "content-type" or (header.startswith("x-") and header != "x-api-key")
