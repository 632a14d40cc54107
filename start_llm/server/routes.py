"""Which path answers what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from start_llm.core.chat import GenerationRequest, Json
from start_llm.core.errors import MethodNotAllowed, NotFound, RequestError
from start_llm.protocols import anthropic_messages, openai_chat, openai_completions
from start_llm.protocols.anthropic_errors import anthropic_refusal
from start_llm.protocols.base import Call, Parser, openai_refusal
from start_llm.server.status import Status

type Refusal = Callable[[RequestError], dict[str, Json]]


@dataclass(frozen=True, slots=True)
class Wire:
    """An endpoint that generates: the path to call it by, how to read a body, and how to say no."""

    path: str
    parse: Parser[Call]
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Counter:
    """An endpoint that says how many tokens the prompt of a request has, and how it says that."""

    parse: Parser[GenerationRequest]
    render: Callable[[int], dict[str, Json]]
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Page:
    """An endpoint that tells: a status code and a JSON body, at once."""

    render: Callable[[Status], tuple[int, Mapping[str, Json]]]


_CHAT = Wire("/v1/chat/completions", openai_chat.parse, openai_refusal)
_TEXT = Wire("/v1/completions", openai_completions.parse, openai_refusal)
_MESSAGES = Wire("/v1/messages", anthropic_messages.parse, anthropic_refusal)
_MODELS = Page(Status.models)

WIRES: Mapping[str, Wire] = {
    _CHAT.path: _CHAT,
    "/chat/completions": _CHAT,
    _TEXT.path: _TEXT,
    "/completions": _TEXT,
    _MESSAGES.path: _MESSAGES,
}
COUNTERS: Mapping[str, Counter] = {
    "/v1/messages/count_tokens": Counter(
        anthropic_messages.parse_count, anthropic_messages.count_json, anthropic_refusal
    ),
}
PAGES: Mapping[str, Page] = {
    "/": Page(Status.greeting),
    "/api/hello": Page(Status.greeting),
    "/health": Page(Status.health),
    "/stats": Page(Status.stats),
    "/v1/models": _MODELS,
    "/models": _MODELS,
}
_MODEL_PREFIX = "/v1/models/"


def find(method: str, target: str) -> Wire | Counter | Page:
    """The endpoint for a request line. Query strings and a trailing slash do not matter.

    Raises:
        NotFound: no such path.
        MethodNotAllowed: the path exists, and answers other methods.
    """
    path = target.partition("?")[0].rstrip("/") or "/"
    endpoint = WIRES.get(path) or COUNTERS.get(path) or PAGES.get(path) or _one_model(path)
    if endpoint is None:
        raise NotFound(f"There is nothing at {path}. Endpoints: {', '.join([*WIRES, *COUNTERS, *PAGES])}.")
    allowed = ("GET", "HEAD") if isinstance(endpoint, Page) else ("POST",)
    if method not in allowed:
        raise MethodNotAllowed(f"{path} answers {' and '.join(allowed)}, not {method}.", allowed=allowed)
    return endpoint


def _one_model(path: str) -> Page | None:
    if not path.startswith(_MODEL_PREFIX):
        return None
    name = unquote(path.removeprefix(_MODEL_PREFIX))
    return Page(lambda status: status.model(name))
