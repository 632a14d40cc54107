"""Which of several servers the request at hand goes to. Tasks that the request starts share the choice."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from start_llm.proxy.config import api_base

_CHOSEN: ContextVar[str] = ContextVar("address of the chosen server")


@contextmanager
def choose(url: str) -> Generator[None]:
    """Let the requests of the block go to the server at this address."""
    token = _CHOSEN.set(url)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def chosen_api_base() -> str:
    """Return the chosen server's address as LiteLLM's configuration has it."""
    return api_base(_CHOSEN.get())
