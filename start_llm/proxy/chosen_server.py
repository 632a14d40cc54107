"""Which of several servers the request at hand goes to. Tasks that the request starts share the choice."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpx

from start_llm.proxy.backend import Backend, Headers
from start_llm.proxy.config import api_base
from start_llm.proxy.error_text import ErrorResponse

_CHOSEN: ContextVar[Backend] = ContextVar("chosen server")


@contextmanager
def choose(backend: Backend) -> Generator[None]:
    """Let the requests of the block go to this server."""
    token = _CHOSEN.set(backend)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def chosen_api_base() -> str:
    """Return the chosen server's address as LiteLLM's configuration has it."""
    return api_base(_CHOSEN.get().url)


class ChosenBackend:
    """Sends requests to the chosen server, as `Backend` does to the only one."""

    async def ask(self, method: str, url: httpx.URL, headers: Headers, body: bytes) -> httpx.Response:
        return await _CHOSEN.get().ask(method, url, headers, body)

    async def refusal(self, scope: Any, body: bytes) -> ErrorResponse | None:
        return await _CHOSEN.get().refusal(scope, body)
