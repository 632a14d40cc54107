"""Which path answers what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from start_llm.core.chat import GenerationRequest, Json
from start_llm.core.errors import MethodNotAllowed, NotFound, RequestError
from start_llm.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from start_llm.protocols.anthropic_errors import anthropic_refusal
from start_llm.protocols.base import Context, Parser, openai_refusal
from start_llm.protocols.explained import explained
from start_llm.server.status import Status
from start_llm.service import Service

type Refusal = Callable[[RequestError], dict[str, Json]]
type Ask = Callable[[Service, GenerationRequest], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Wire:
    """An endpoint that generates: the path to call it by, how to read a body, and how to say no."""

    path: str
    parse: Parser
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Question:
    """An endpoint that takes what `wire` takes, and says something of it without computing anything."""

    wire: Wire
    ask: Ask


@dataclass(frozen=True, slots=True)
class Own:
    """An endpoint that shows or changes what is kept for a tenant, at once."""

    render: Callable[[Context], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Page:
    """An endpoint that tells: a status code and a JSON body, at once."""

    render: Callable[[Status], tuple[int, Mapping[str, Json]]]


def _count(wire: Wire, told: Callable[[int], Mapping[str, Json]]) -> Question:
    """How many tokens the prompt of such a request has."""
    return Question(wire, lambda service, request: told(service.count(request)))


_CHAT = Wire("/v1/chat/completions", openai_chat.parse, openai_refusal)
_TEXT = Wire("/v1/completions", openai_completions.parse, openai_refusal)
_MESSAGES = Wire("/v1/messages", anthropic_messages.parse, anthropic_refusal)
_MESSAGE_TOKENS = _count(
    Wire("/v1/messages/count_tokens", anthropic_messages.parse_count, anthropic_refusal),
    anthropic_messages.count_json,
)
_RESPONSES = Wire("/v1/responses", openai_responses.parse, openai_responses.refusal)
_RESPONSE_TOKENS = _count(_RESPONSES, openai_responses.counted)
_EXPLAIN = Question(_CHAT, lambda service, request: explained(service.explain(request)))
_MODELS = Page(Status.models)

type Endpoint = Wire | Question | Own | Page
WIRES: Mapping[str, Wire | Question] = {
    _CHAT.path: _CHAT,
    "/chat/completions": _CHAT,
    _TEXT.path: _TEXT,
    "/completions": _TEXT,
    _MESSAGES.path: _MESSAGES,
    _MESSAGE_TOKENS.wire.path: _MESSAGE_TOKENS,
    _RESPONSES.path: _RESPONSES,
    "/responses": _RESPONSES,
    f"{_RESPONSES.path}/input_tokens": _RESPONSE_TOKENS,
    "/responses/input_tokens": _RESPONSE_TOKENS,
    "/v1/cache/explain": _EXPLAIN,
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
_RESPONSE_PREFIXES = ("/v1/responses/", "/responses/")
_READING = ("GET", "HEAD")


OPEN = frozenset({"/", "/api/hello", "/health"})
"""They ask for no key: who looks whether a server is there may have none, and they tell nothing else."""


def refusal_at(target: str) -> Refusal:
    """How to say no in the words of the protocol that a path belongs to, be there something or not."""
    path = _path_of(target)
    match WIRES.get(path):
        case Wire(refusal=refusal) | Question(wire=Wire(refusal=refusal)):
            return refusal
        case _:
            return anthropic_refusal if path.startswith(f"{_MESSAGES.path}/") else openai_refusal


def asks_key(target: str) -> bool:
    """Whether who sends this request line has to have a key."""
    return _path_of(target) not in OPEN


def _path_of(target: str) -> str:
    return target.partition("?")[0].rstrip("/") or "/"


def find(method: str, target: str) -> Endpoint:
    """The endpoint for a request line. Query strings and a trailing slash do not matter.

    Raises:
        NotFound: no such path.
        MethodNotAllowed: the path exists, and answers other methods.
    """
    path = _path_of(target)
    endpoints = _endpoints(path)
    if not endpoints:
        raise NotFound(f"There is nothing at {path}. Endpoints: {', '.join([*WIRES, *PAGES])}.")
    if method not in endpoints:
        allowed = tuple(endpoints)
        raise MethodNotAllowed(f"{path} answers {' and '.join(allowed)}, not {method}.", allowed=allowed)
    return endpoints[method]


def _endpoints(path: str) -> Mapping[str, Endpoint]:
    """What is at a path, by method."""
    if path in WIRES:
        return {"POST": WIRES[path]}
    page = PAGES.get(path) or _one_model(path)
    return dict.fromkeys(_READING, page) if page else _one_response(path)


def _one_model(path: str) -> Page | None:
    if not path.startswith(_MODEL_PREFIX):
        return None
    name = unquote(path.removeprefix(_MODEL_PREFIX))
    return Page(lambda status: status.model(name))


def _one_response(path: str) -> Mapping[str, Endpoint]:
    prefix = next((prefix for prefix in _RESPONSE_PREFIXES if path.startswith(prefix)), None)
    if prefix is None:
        return {}
    name = unquote(path.removeprefix(prefix))
    told = Own(lambda context: openai_responses.kept(context, name))
    return dict.fromkeys(_READING, told) | {
        "DELETE": Own(lambda context: openai_responses.deleted(context, name))
    }
